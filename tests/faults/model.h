/* tests/faults/model.h: a language model of a few hundred parameters, its optimizer and one training step: what the tests here break things
 * under. Knows the public half of te.h. */
#ifndef FAULTS_MODEL_H
#define FAULTS_MODEL_H

#include "../te_test.h"

enum { VOCABULARY = 11, WIDTH = 16, LENGTH = 5, BATCH = 2 };

typedef struct model {
    te_module *gpt;
    te_optimizer *adam;
    te_recipe_kind recipe; /* TE_RECIPE_NONE: high precision */
} model;

static te_result model__forward(te_module *self, te_forward_args *args) { /* ids [s, b] -> logits [s, b, VOCABULARY] */
    te_rotary_desc rotary = {0};
    te_forward_args layer = {0};
    layer.input = te_forward(te_module_child(self, 0), args->input);
    layer.rotary = &rotary;
    args->outputs.out =
        te_linear(te_forward_with(te_module_child(self, 1), &layer), te_module_parameter(te_module_child(self, 0), "weight"), NULL);
    return te_error_code(te_module_ctx(self));
}

/* plain: RMSNorm, SwiGLU, grouped heads, no biases; else LayerNorm, GELU, biases, dropout. On an error whatever could be made. */
static TE_MAYBE_UNUSED model model_create(te_ctx *te, te_recipe_kind recipe, bool plain) {
    static const te_module_class cls = {"Model", 0, model__forward, NULL, NULL};
    te_embedding_desc table = {0};
    te_transformer_layer_desc layer = {0};
    te_fused_adam_desc adam = {0};
    model m = {0};
    table.num_embeddings = VOCABULARY;
    table.embedding_dim = layer.hidden_size = layer.ffn_hidden_size = WIDTH;
    table.init.std = 1;
    layer.attention.num_attention_heads = 4;
    layer.attention.num_gqa_groups = plain ? 2 : 4;
    layer.gemm.no_bias = plain;
    layer.norm.normalization = plain ? TE_RMSNORM : TE_LAYERNORM;
    layer.activation = plain ? TE_SWIGLU : TE_GELU;
    layer.hidden_dropout = layer.attention.attention_dropout = plain ? 0 : 0.1f;
    adam.max_grad_norm = 1;
    adam.weight_decay = 0.1f;
    m.recipe = recipe;
    m.gpt = te_module_create(te, &cls, "gpt");
    te_module *child = te_embedding_create(te, &table);
    if (!te_module_add_child(m.gpt, "embedding", child)) te_module_destroy(child);
    child = te_transformer_layer_create(te, &layer);
    if (!te_module_add_child(m.gpt, "layer", child)) te_module_destroy(child);
    m.adam = te_fused_adam_create(te, m.gpt, &adam);
    return m;
}
static TE_MAYBE_UNUSED void model_destroy(model *m) {
    te_optimizer_destroy(m->adam);
    te_module_destroy(m->gpt);
    m->adam = NULL;
    m->gpt = NULL;
}

/* The mean loss of one batch; in a scope, for the caller to end. */
static TE_MAYBE_UNUSED te_tensor *model_loss(te_ctx *te, const model *m) {
    int32_t ids[LENGTH * BATCH], targets[LENGTH * BATCH];
    te_recipe recipe = m->recipe == TE_RECIPE_DELAYED ? te_recipe_delayed_scaling() : te_recipe_current_scaling();
    te_autocast_desc cast = {0};
    for (int i = 0; i < LENGTH * BATCH; i++) {
        ids[i] = i * 7 % VOCABULARY;
        targets[i] = (i * 7 + 3) % VOCABULARY;
    }
    if (recipe.kind == TE_RECIPE_DELAYED) recipe.delayed.amax_history_len = 3;
    cast.recipe = &recipe;
    cast.disabled = m->recipe == TE_RECIPE_NONE;
    te_autocast_begin(te, &cast);
    te_tensor *logits = te_forward(m->gpt, te_tensor_from_host(te, TE_I32, SHAPE(LENGTH, BATCH), ids));
    te_autocast_end(te);
    return te_cross_entropy(logits, te_tensor_from_host(te, TE_I32, SHAPE(LENGTH, BATCH), targets), NULL);
}

/* One step as users write it, checked by nobody. The loss, or NaN. */
static TE_MAYBE_UNUSED double model_step(te_ctx *te, const model *m) {
    te_scope_begin(te);
    te_tensor *loss = model_loss(te, m);
    te_backward(loss);
    double value = te_tensor_item(loss);
    te_optimizer_step(m->adam);
    te_scope_end(te);
    return value;
}

#endif /* FAULTS_MODEL_H */
