/* moe.c: a mixture of experts, two of eight for each token, that trains in FP8, recorded once as a graph and launched again and again. Each launch routes other
 * tokens to other experts: how many rows each expert has is known to the device alone, and no step waits for it.
 *
 *     ./moe [STEPS]      on the first GPU if there is one, else on the CPU */
#define TE_IMPLEMENTATION
#include "te.h"
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 256, WIDTH = 128, EXPERTS = 8, TOPK = 2, KINDS = 4 /* of tokens, each with a map of its own to learn */ };

typedef struct moe {
    te_module *router, *up, *down, *all;
} moe;

static moe moe_create(te_ctx *te) {
    moe m;
    m.router = te_linear_create(te, &(te_linear_desc){.in_features = WIDTH, .out_features = EXPERTS, .gemm.no_bias = true, .name = "router"});
    m.up = te_grouped_linear_create(te, &(te_grouped_linear_desc){.num_gemms = EXPERTS, .in_features = WIDTH, .out_features = 4 * WIDTH, .gemm.no_bias = true, .name = "up"});
    m.down = te_grouped_linear_create(te, &(te_grouped_linear_desc){.num_gemms = EXPERTS, .in_features = 2 * WIDTH, .out_features = WIDTH, .gemm.no_bias = true, .name = "down"});
    m.all = te_sequential_create(te, (te_module *[]){m.router, m.up, m.down}, 3); /* owns them, for the optimizer; it is never run */
    return m;
}

/* The layer's output for x [TOKENS, WIDTH]; *balance: the loss that keeps experts evenly busy; counts i64 [EXPERTS]: tokens of each expert. */
static te_tensor *moe_forward(const moe *m, te_tensor *x, const te_recipe *recipe, te_tensor *counts, te_tensor **balance) {
    te_ctx *te = te_module_ctx(m->all);
    te_tensor *map, *row_id_map, *logits = te_forward(m->router, x); /* in BF16: routers are not quantized */
    te_tensor *probs = te_fused_topk_with_score_function(logits, &(te_fused_topk_desc){.topk = TOPK}, &map);
    te_tensor *rows = te_moe_permute(x, map, TOKENS * TOPK, TE_MAP_MASK, &row_id_map);
    te_op_moe_mask_map(te, &(te_op_moe_mask_map_args){.routing_map = map, .row_id_map = row_id_map, .tokens_per_expert = counts});

    te_forward_args up = {.input = rows, .m_splits_tensor = counts}, down = {.m_splits_tensor = counts};
    te_autocast_begin(te, &(te_autocast_desc){.recipe = recipe});
    down.input = te_activate(te_forward_with(m->up, &up), TE_SWIGLU, NULL);
    te_forward_with(m->down, &down);
    te_autocast_end(te);

    te_tensor *scores = te_fused_compute_score_for_moe_aux_loss(logits, TOPK, TE_SCORE_SOFTMAX, TE_ROUTING_BYTEMAP, NULL);
    *balance = te_fused_moe_aux_loss(scores, counts, &(te_fused_moe_aux_loss_desc){.total_num_tokens = TOKENS, .num_experts = EXPERTS, .topk = TOPK, .coeff = 0.01f});
    return te_moe_unpermute(down.outputs.out, row_id_map, &(te_moe_unpermute_desc){.merging_probs = probs});
}

/* Tokens are noise around the center of their kind, and the target is the token, shifted by as many places as its kind says. */
static void next_batch(te_ctx *te, te_tensor *x, te_tensor *target) {
    static float in[TOKENS][WIDTH], out[TOKENS][WIDTH];
    te_scope_begin(te);
    te_tensor_to_f32(te_tensor_normal(te, TE_F32, 2, (int64_t[]){TOKENS, WIDTH}, 0, 1), &in[0][0]);
    te_scope_end(te);
    int share = 1 + rand() % (TOKENS - 1); /* how many tokens are of the first two kinds changes from step to step */
    for (int t = 0; t < TOKENS; t++) {
        int kind = t < share ? t % 2 : 2 + t % 2;
        for (int i = 0; i < WIDTH; i++) in[t][i] += i % KINDS == kind ? 2.0f : 0.0f;
        for (int i = 0; i < WIDTH; i++) out[t][i] = in[t][(i + 1 + kind) % WIDTH];
    }
    te_tensor *host_x = te_tensor_from_f32(te, TE_BF16, 2, (int64_t[]){TOKENS, WIDTH}, &in[0][0]), *host_y = te_tensor_from_f32(te, TE_BF16, 2, (int64_t[]){TOKENS, WIDTH}, &out[0][0]);
    te_tensor_copy(x, host_x);
    te_tensor_copy(target, host_y);
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 300;
    te_ctx *te = te_ctx_create(NULL);
    moe m = moe_create(te);
    te_optimizer *adam = te_fused_adam_create(te, m.all, &(te_fused_adam_desc){.lr = 3e-3f});
    te_recipe recipe = te_recipe_delayed_scaling();
    te_tensor *x = te_tensor_zeros(te, TE_BF16, 2, (int64_t[]){TOKENS, WIDTH}), *target = te_tensor_zeros(te, TE_BF16, 2, (int64_t[]){TOKENS, WIDTH});
    te_tensor *counts = te_tensor_zeros(te, TE_I64, 1, (int64_t[]){EXPERTS}), *loss = te_tensor_zeros(te, TE_F32, 1, (int64_t[]){1});
    te_graph *graph = NULL;

    for (int step = 0; step < steps && te_ok(te); step++) {
        next_batch(te, x, target);
        if (step < 2) { /* the first step runs by calls, which makes the scales; the second one is recorded */
            if (step == 1) te_graph_begin(te);
            te_scope_begin(te);
            te_tensor *balance, *y = moe_forward(&m, x, &recipe, counts, &balance), *error = te_mse_loss(y, target);
            te_backward(te_add(error, balance));
            te_optimizer_step(adam);
            te_optimizer_zero_grad(adam);
            te_tensor_copy(loss, error);
            te_scope_end(te);
            if (step == 1) graph = te_graph_end(te);
        }
        if (step >= 1) te_graph_launch(graph);
        if (step % 25 == 0 || step == steps - 1) {
            int64_t n[EXPERTS];
            te_tensor_to_host(counts, n);
            printf("step %4d  loss %.4f  tokens of each expert", step, te_tensor_item(loss));
            for (int e = 0; e < EXPERTS; e++) printf(" %3d", (int)n[e]);
            printf("\n");
        }
    }
    if (!te_ok(te)) fprintf(stderr, "%s\n", te_error(te));
    int failed = !te_ok(te);
    te_graph_destroy(graph);
    te_optimizer_destroy(adam);
    te_module_destroy(m.all);
    te_ctx_destroy(te);
    return failed;
}
