/* step.h: a step of units whose bytes on the way, and whose peak of memory, are those of the formulas of
 * api/sharding.h. */
#ifndef TE_TEST_STEP_H_INCLUDED
#define TE_TEST_STEP_H_INCLUDED

#include "shards.h"

/* Blocks of 2 w^2 elements, each a unit; few rows, so that activations are small beside them. */
enum { STEP_BLOCKS = 6 };
typedef struct step_case {
    const number_case *num;
    te_shard shard;
    bool stay; /* no_reshard_after_forward */
    int64_t width;
    bool flights; /* the group runs exchanges on a second stream */
    double *peak; /* gets the last peak, in bytes for each element of a unit; or NULL */
} step_case;
static TE_MAYBE_UNUSED te_module *step_model(rank_state *s, const step_case *c) {
    te_recipe recipe = c->num->recipe();
    te_module *m = te_module_create(s->te, &chain, "deep");
    const te_data_parallel_desc d = {.group = s->group, .shard = c->shard, .no_reshard_after_forward = c->stay};
    te_seed(s->te, 3);
    if (c->num->stored) te_quantized_model_init_begin(s->te, &(te_quantized_model_init_desc){.recipe = &recipe});
    for (int i = 0; i < STEP_BLOCKS; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        te_module *block = te_module_add_child(
            m, name,
            te_layernorm_mlp_create(s->te, &(te_layernorm_mlp_desc){.hidden_size = c->width,
                                                                    .ffn_hidden_size = c->width,
                                                                    .gemm.params_dtype = c->num->dtype}));
        EXPECT(s, te_fsdp_unit(block, &d) == TE_OK);
    }
    if (c->num->stored) te_quantized_model_init_end(s->te);
    return m;
}
/* got is want, and up to a fiftieth more: norms and biases, flags of gradients, rounding to slices and to the pool's
 * blocks. */
static TE_MAYBE_UNUSED bool is_about(uint64_t got, uint64_t want) { return got >= want && got <= want + want / 50; }
/* Few rows in plain formats: a sixty-fourth of a unit for each activation. */
static TE_MAYBE_UNUSED te_result step_batch(te_module *m, const step_case *c, int seed) {
    const shard_case batch = {.num = c->num, .width = c->width};
    te_ctx *te = te_module_ctx(m);
    if (c->num->stored) return run_batch(m, &batch, seed, NULL);
    te_scope_begin(te);
    te_seed(te, (uint64_t)seed);
    te_tensor *y = te_forward(m, te_tensor_normal(te, c->num->dtype, SHAPE(4, c->width), 0, 1));
    te_result result = te_backward(te_mean_all(te_activate(y, TE_GELU, NULL)));
    te_scope_end(te);
    return result;
}
/* The fewest and the most bytes of a peak, for each element of a unit. */
typedef struct step_peak_range {
    double from, to;
} step_peak_range;
/* The most that a step in bf16 takes beside what is there between steps, in bytes for each element of a unit: the
 * formula of api/sharding.h. The pool rounds a buffer of some elements more than a power of two up by an eighth. */
static TE_MAYBE_UNUSED double peak_of(const step_case *c, int ranks) {
    const double n = ranks, b = STEP_BLOCKS, gradient = 2, parameter = 2, sums = 9.0 / 8 * 4; /* 16 bits, sent and received */
    if (c->shard == TE_SHARD_NONE) return b * gradient + 9.0 / 8 * (ranks == 2 ? 2 : 4);
    if (c->shard == TE_SHARD_OPTIMIZER) return (b - 1) * gradient / n + gradient + sums; /* the last unit */
    if (c->stay) return (b - 1) * parameter + gradient + sums; /* the first unit of the pass: the others are whole */
    /* the last but one: the last unit is gathered ahead of it */
    return (b - 2) * gradient / n + gradient + sums + 9.0 / 8 * parameter;
}
/* A weight of 16 bits whose gradient is computed, or copied, is half a unit of 2 bytes an element; the rest is norms,
 * biases and activations. A second exchange under way has sums of its own, and the gradients of another unit. */
static TE_MAYBE_UNUSED step_peak_range peaks_of(const step_case *c, int ranks) {
    const double want = peak_of(c, ranks);
    const double second = c->shard == TE_SHARD_NONE ? 9.0 / 8 * 4 : 2 + 9.0 / 8 * 4;
    return (step_peak_range){want, want + 1.35 + (c->flights ? second : 0)};
}
static TE_MAYBE_UNUSED void step_rank(rank_state *s) {
    const step_case *c = (const step_case *)s->arg;
    const uint64_t n = (uint64_t)s->size, one = (uint64_t)(2 * c->width * c->width), all = STEP_BLOCKS * one;
    const uint64_t code = !c->num->stored ? 2 : c->num->recipe == te_recipe_mxfp8 ? 2 : 1; /* bytes of an element */
    te_module *m = step_model(s, c);
    te_optimizer *opt = te_fused_adam_create(s->te, m, &(te_fused_adam_desc){.lr = 1e-3f});
    for (int step = 0; step < 3; step++) {
        const size_t kept = te_memory_get_stats(s->te).allocated;
        te_group_reset_stats(s->group);
        te_memory_reset_peak(s->te);
        EXPECT(s, step_batch(m, c, step * s->size + s->rank) == TE_OK && te_optimizer_step(opt) == TE_OK);
        const te_group_stats sent = te_group_get_stats(s->group);
        const size_t peak = te_memory_get_stats(s->te).peak_allocated - kept;
        if (step == 0) continue; /* scaling state is made, and what comes next is learned */
        if (c->shard == TE_SHARD_NONE)
            EXPECT(s, is_about(sent.all_reduce.bytes, 2 * (n - 1) * (n == 2 ? 2 : 4) * all / n) && !sent.all_gather.calls);
        else {
            const uint64_t gathers = c->shard == TE_SHARD_OPTIMIZER || c->stay ? 1 : 2;
            EXPECT(s, is_about(sent.all_to_all.bytes, (n - 1) * 2 * all / n) && !sent.reduce_scatter.calls);
            EXPECT(s, is_about(sent.all_gather.bytes, (n - 1) * gathers * code * all / n));
        }
        const step_peak_range want = peaks_of(c, s->size);
        const double got = (double)peak / (double)one;
        if (c->peak) *c->peak = got;
        if (!c->num->stored && !(got >= want.from && got <= want.to)) {
            char text[96];
            snprintf(text, sizeof text, "the peak is %.3f bytes for each element of a unit, not %.3f to %.3f", got,
                     want.from, want.to);
            wrong(s, text);
        }
    }
    te_optimizer_destroy(opt);
    te_module_destroy(m);
}

#endif /* TE_TEST_STEP_H_INCLUDED */
