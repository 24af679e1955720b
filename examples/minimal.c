/* minimal.c: the shortest program that trains a transformer layer in FP8, on a GPU if there is one. */
#define TE_IMPLEMENTATION
#include "te.h"
#include <stdio.h>

int main(void) {
    te_ctx *te = te_ctx_create(NULL); /* GPU 0 if there is one, else the CPU */
    te_module *layer = te_transformer_layer_create(te, &(te_transformer_layer_desc){
        .hidden_size = 256, .ffn_hidden_size = 704, .attention.num_attention_heads = 8, .attention.num_gqa_groups = 2,
        .norm.normalization = TE_RMSNORM, .activation = TE_SWIGLU, .gemm.no_bias = true});
    te_optimizer *adam = te_fused_adam_create(te, layer, &(te_fused_adam_desc){.lr = 3e-3f});
    te_recipe recipe = te_recipe_current_scaling();
    te_tensor *x = te_tensor_normal(te, TE_BF16, 3, (int64_t[]){64, 4, 256}, 0, 1); /* the one batch: y shall become x / 2 */

    for (int step = 0; step < 20; step++) {
        te_scope_begin(te); /* every tensor made below dies at te_scope_end, unless retained */
        te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
        te_tensor *y = te_forward(layer, x);
        te_autocast_end(te);
        te_tensor *loss = te_mse_loss(y, te_scale(x, 0.5f));
        te_backward(loss);
        te_optimizer_step(adam);
        printf("step %2d  loss %.4f\n", step, te_tensor_item(loss));
        te_scope_end(te);
    }
    if (!te_ok(te)) fprintf(stderr, "%s\n", te_error(te)); /* the first error, once, with its whole story */
    te_optimizer_destroy(adam);
    te_module_destroy(layer);
    te_ctx_destroy(te);
    return 0;
}
