/* Cross-entropy of a vocabulary that ranks share: 2 and 4 threads against one context that has all of it. */
#include "ranks.h"

enum { ROWS = 24, VOCAB = 136 }; /* a multiple of 4 */

typedef struct loss_case {
    te_dtype dtype;
    float smoothing;
    bool no_reduce, inplace;
} loss_case;

/* Logits in f32 order, some of them -inf; targets, some ignored. */
static void make_case(float *logits, int32_t *target) {
    for (int i = 0; i < ROWS * VOCAB; i++) logits[i] = 5 * sinf((float)i * 0.7f) + (float)(i % 13) * 0.25f;
    for (int i = 0; i < ROWS; i++) target[i] = i % 6 == 1 ? -100 : i * 53 % VOCAB;
    for (int k = 0; k < VOCAB; k += 2) logits[3 * VOCAB + k] = -INFINITY;
    logits[3 * VOCAB + target[3]] = 1;
}
/* Leaves behind the losses of a rank, and the gradients of its columns. */
static void rank_loss(rank_state *s) {
    const loss_case *c = (const loss_case *)s->arg;
    float all[ROWS * VOCAB], upstream[ROWS];
    int32_t target[ROWS];
    int64_t columns = VOCAB / s->size;
    make_case(all, target);
    for (int i = 0; i < ROWS; i++) upstream[i] = 0.5f + (float)i * 0.125f;
    float *mine = (float *)malloc(sizeof(float) * (size_t)(ROWS * columns));
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t k = 0; k < columns; k++) mine[i * columns + k] = all[i * VOCAB + s->rank * columns + k];
    te_tensor *x = te_tensor_cast(te_tensor_from_host(s->te, TE_F32, SHAPE(ROWS, columns), mine), c->dtype);
    te_tensor *y = te_scale(te_tensor_set_requires_grad(x, true), 1); /* logits that are no leaf */
    te_cross_entropy_desc desc = {.label_smoothing = c->smoothing, .no_reduce_loss = c->no_reduce, .dist_process_group = s->group, .inplace_backward = c->inplace};
    te_tensor *loss = te_cross_entropy(y, te_tensor_from_host(s->te, TE_I32, SHAPE(ROWS), target), &desc);
    if (c->no_reduce) te_backward_from(loss, te_tensor_from_host(s->te, TE_F32, SHAPE(ROWS), upstream));
    else te_backward(loss);
    float *losses = (float *)calloc(ROWS, sizeof(float));
    EXPECT(s, te_tensor_to_f32(loss, losses) == TE_OK);
    EXPECT(s, te_tensor_to_f32(te_tensor_grad(x), mine) == TE_OK);
    if (c->inplace) { /* the logits' memory has the gradient */
        float *over = (float *)malloc(sizeof(float) * (size_t)(ROWS * columns));
        EXPECT(s, te_tensor_to_f32(y, over) == TE_OK && memcmp(over, mine, sizeof(float) * (size_t)(ROWS * columns)) == 0);
        free(over);
    }
    s->left[s->num_left++] = losses;
    s->left[s->num_left++] = mine;
}

TE_TEST(cross_entropy_of_a_shared_vocabulary) {
    static const loss_case cases[] = {{TE_F32, 0, false, false}, {TE_F32, 0.1f, false, true}, {TE_F32, 0.1f, true, false}, {TE_BF16, 0.1f, false, false}, {TE_F16, 0, true, true}};
    for (int c = 0; c < COUNT(cases); c++) {
        rank_state *one = run_ranks(0, rank_loss, &cases[c]);
        const float *loss = (const float *)one->left[0], *grad = (const float *)one->left[1];
        double step = cases[c].dtype == TE_F32 ? 0 : cases[c].dtype == TE_BF16 ? 0x1p-8 : 0x1p-11; /* half a unit: a sum in another order may round apart */
        for (int size = 2; size <= 4; size += 2) {
            rank_state *all = run_ranks(size, rank_loss, &cases[c]);
            int columns = VOCAB / size;
            for (int r = 0; r < size; r++) {
                const float *losses = (const float *)all[r].left[0], *mine = (const float *)all[r].left[1];
                test_case("case %d, rank %d of %d", c, r, size);
                CHECK_BYTES("losses of all ranks", losses, all[0].left[0], ROWS * 4);
                for (int i = 0; i < ROWS; i++)
                    CHECK_MSG(losses[i] == loss[i] || fabsf(losses[i] - loss[i]) <= 2e-6f * (1 + fabsf(loss[i])), "loss %d is %g; alone it is %g", i, (double)losses[i], (double)loss[i]);
                for (int i = 0; i < ROWS; i++)
                    for (int k = 0; k < columns; k++) {
                        double got = (double)mine[i * columns + k], want = (double)grad[i * VOCAB + r * columns + k];
                        CHECK_MSG(fabs(got - want) <= (2 * step + 4e-6) * fabs(want) + 1e-7, "gradient [%d, %d] is %g; alone it is %g", i, k, got, want);
                    }
            }
        }
    }
}
