/* test_exchange.c: gradients that nodes of the program's own make travel too, though the tape does not show which
 * parameters such a node reads. */
#include "shards.h"

typedef struct own_case {
    te_shard shard;
    int units; /* 0: one of the whole model, 1: one for each block, 2: the block in the node is a model of its own */
    int own;   /* the block in the node */
} own_case;

enum { OWN_BLOCKS = 3, OWN_WIDTH = 24 };

/* A program's own checkpoint of a block: its forward records nothing, and its backward function runs the block again
 * and plays it. */
static te_result own_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                              te_tensor **dx, const bool *needs) {
    te_module *block = *(te_module *const *)state;
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_detach(saved[0]), true);
    (void)needs;
    te_enable_grad_begin(te);
    te_tensor *y = te_forward(block, x);
    te_enable_grad_end(te);
    te_result result = y ? te_backward_from(y, dy[0]) : te_error_code(te);
    dx[0] = te_tensor_grad(x);
    return result;
}
static te_tensor *own_checkpoint(te_module *block, te_tensor *x) {
    te_ctx *te = te_module_ctx(block);
    te_no_grad_begin(te);
    te_tensor *y = te_forward(block, x);
    te_no_grad_end(te);
    return te_record(te, &(te_node_desc){.name = "own checkpoint",
                                         .inputs = &x,
                                         .num_inputs = 1,
                                         .outputs = &y,
                                         .num_outputs = 1,
                                         .saved = &x,
                                         .num_saved = 1,
                                         .state = (const void *)&block,
                                         .state_size = sizeof(block),
                                         .backward = own_backward}) == TE_OK
               ? y
               : NULL;
}
static te_module *own_block(te_ctx *te) {
    return te_linear_create(
        te, &(te_linear_desc){
                .in_features = OWN_WIDTH, .out_features = OWN_WIDTH, .gemm.params_dtype = TE_F32});
}
/* Blocks 0 to 2 in model[0]; or one of them is model[1]. */
static void own_model(rank_state *s, const own_case *c, te_shard shard, te_module *model[2],
                      te_module *block[OWN_BLOCKS]) {
    const te_data_parallel_desc d = {.group = s->group, .shard = shard, .no_init_sync = true};
    model[0] = te_module_create(s->te, &chain, "model");
    model[1] = NULL;
    te_seed(s->te, 4);
    for (int i = 0; i < OWN_BLOCKS; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        block[i] = own_block(s->te);
        if (c->units == 2 && i == c->own) model[1] = block[i];
        else te_module_add_child(model[0], name, block[i]);
        if (c->units == 1) EXPECT(s, te_fsdp_unit(block[i], &d) == TE_OK);
    }
    EXPECT(s, te_fsdp_unit(model[0], &d) == TE_OK);
    if (model[1]) EXPECT(s, te_fsdp_unit(model[1], &d) == TE_OK);
}
static void own_rank(rank_state *s) {
    const own_case *c = (const own_case *)s->arg;
    te_module *model[2][2], *block[2][OWN_BLOCKS];
    te_optimizer *sgd[2][2] = {{NULL}};
    for (int k = 0; k < 2; k++) {
        own_model(s, c, k ? c->shard : TE_SHARD_NONE, model[k], block[k]);
        for (int i = 0; i < 2 && model[k][i]; i++)
            sgd[k][i] = te_fused_sgd_create(s->te, model[k][i], &(te_fused_sgd_desc){.lr = 0.5f});
    }
    for (int step = 0; step < 2; step++)
        for (int k = 0; k < 2; k++) {
            te_scope_begin(s->te);
            te_seed(s->te, (uint64_t)(90 + step * s->size + s->rank));
            te_tensor *y = te_tensor_normal(s->te, TE_F32, SHAPE(8, OWN_WIDTH), 0, 1);
            te_tensor_set_requires_grad(y, true);
            for (int i = 0; i < OWN_BLOCKS; i++)
                y = k && i == c->own ? own_checkpoint(block[k][i], y) : te_forward(block[k][i], y);
            EXPECT(s, te_backward(te_mean_all(te_activate(y, TE_GELU, NULL))) == TE_OK);
            te_scope_end(s->te);
            for (int i = 0; i < 2 && sgd[k][i]; i++) EXPECT(s, te_optimizer_step(sgd[k][i]) == TE_OK);
        }
    for (int i = 0; i < 2 && model[0][i]; i++) expect_same(s, model[1][i], model[0][i], 0);
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 2; i++) {
            te_optimizer_destroy(sgd[k][i]);
            te_module_destroy(model[k][i]);
        }
}
TE_TEST(exchange_of_gradients_that_a_node_makes_by_itself) {
    for (int shard = TE_SHARD_NONE; shard <= TE_SHARD_PARAMETERS; shard++)
        for (int i = 0; i < 3 * OWN_BLOCKS; i++) {
            const own_case c = {(te_shard)shard, i % 3, i / 3};
            test_case("shard %d, units %d, block %d", shard, c.units, c.own);
            run_ranks(2, own_rank, &c);
        }
}
