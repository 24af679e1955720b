/* step.h: a step of units whose bytes on the way, and whose peak of memory, are those of the formulas of
 * api/sharding.h. */
#ifndef TE_TEST_STEP_H_INCLUDED
#define TE_TEST_STEP_H_INCLUDED

#include "shards.h"

/* Blocks of 2 w^2 elements, each a unit; few rows, so that activations are small beside them. The pool makes a buffer
 * of 2 w^2 bytes, and of twice as many and some more, 1.6 percent larger at these widths; other ones may cost an
 * eighth. Weights that are stored quantized need 32 rows, and wider blocks. */
enum { STEP_BLOCKS = 6, STEP_WIDTH = 336, STEP_WIDE = 672, STEP_WIDTH_ON_GPU = 1344 };
typedef struct step_peaks {
    double step, forward, activations; /* bytes for each element of a unit; activations: of a forward without units */
} step_peaks;
typedef struct step_case {
    const number_case *num;
    te_shard shard;
    bool stay; /* no_reshard_after_forward */
    int64_t width;
    bool flights; /* the group runs exchanges on a second stream */
    step_peaks *peaks; /* gets the last step's; or NULL */
} step_case;
static TE_MAYBE_UNUSED te_module *step_model(rank_state *s, const step_case *c, bool units) {
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
        if (units) EXPECT(s, te_fsdp_unit(block, &d) == TE_OK);
    }
    if (c->num->stored) te_quantized_model_init_end(s->te);
    return m;
}
/* got is want, and up to a fiftieth more: norms and biases, flags of gradients, rounding to slices and to the pool's
 * blocks. */
static TE_MAYBE_UNUSED bool is_about(uint64_t got, uint64_t want) { return got >= want && got <= want + want / 50; }
/* *forward gets the peak up to the end of the forward. */
static TE_MAYBE_UNUSED te_result step_batch(te_module *m, const step_case *c, int seed, size_t *forward) {
    te_ctx *te = te_module_ctx(m);
    te_recipe recipe = c->num->recipe();
    te_scope_begin(te);
    te_seed(te, (uint64_t)seed);
    if (c->num->autocast) te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
    te_tensor *y = te_forward(m, te_tensor_normal(te, c->num->dtype, SHAPE(c->num->stored ? 32 : 4, c->width), 0, 1));
    if (c->num->autocast) te_autocast_end(te);
    *forward = te_memory_get_stats(te).peak_allocated;
    te_result result = te_backward(te_mean_all(te_activate(y, TE_GELU, NULL)));
    te_scope_end(te);
    return result;
}
/* The most that a forward takes of a model that no ranks share, beside what is there before it. */
static TE_MAYBE_UNUSED size_t step_activations(rank_state *s, const step_case *c) {
    te_module *m = step_model(s, c, false);
    size_t forward = 0, kept = 0;
    for (int step = 0; step < 2; step++) { /* the first one makes scaling state */
        kept = te_memory_get_stats(s->te).allocated;
        te_memory_reset_peak(s->te);
        EXPECT(s, step_batch(m, c, step, &forward) == TE_OK);
        te_module_zero_grad(m);
    }
    te_module_destroy(m);
    return forward - kept;
}

/* Bytes of an element of a unit's parameters: as they are gathered, and with the columnwise copies that products have
 * then. */
static TE_MAYBE_UNUSED double step_gathered(const step_case *c) {
    return c->num->stored && c->num->recipe != te_recipe_mxfp8 ? 1 : 2;
}
enum { STEP_WHOLE = 2 };
/* The most that a forward takes of units whose parameters are sharded, beside activations, in bytes for each element of
 * a unit: one that runs, and the next one, gathered ahead. Of units that stay: all, and the last one as it comes. */
static TE_MAYBE_UNUSED double forward_peak_of(const step_case *c) {
    return c->stay ? (STEP_BLOCKS - 1) * STEP_WHOLE + 2 * step_gathered(c) : STEP_WHOLE + step_gathered(c);
}
/* The most that a step takes beside what is there between steps, and activations: the formula of api/sharding.h, for
 * weights of 16 bits. 4: the rows that a unit's exchange sends, and those that it receives. */
static TE_MAYBE_UNUSED double peak_of(const step_case *c, int ranks) {
    const double n = ranks, b = STEP_BLOCKS, gradient = 2, slice = gradient / n, ahead = step_gathered(c);
    if (c->shard == TE_SHARD_NONE && c->flights && ranks == 2) return b * gradient; /* NCCL sums them where they are */
    if (c->shard == TE_SHARD_NONE) return b * gradient + (c->flights ? 2 : 1) * (ranks == 2 ? 2 : 4);
    if (c->stay) /* the first unit of the pass; the third, with the exchanges of two units before it under way */
        return c->flights ? (b - 2) * STEP_WHOLE + 8 + gradient : (b - 1) * STEP_WHOLE + gradient + 4;
    if (c->shard == TE_SHARD_OPTIMIZER) { /* the last unit; with flights, the one before the last lands in f32 */
        if (!c->flights) return (b - 1) * slice + gradient + 4;
        return (b - 2) * slice + 8 + gradient + (ranks > 2 ? 4 / n : 0);
    }
    if (!c->flights) return fmax((b - 2) * slice + gradient + 4 + ahead, (b - 1) * slice + gradient + 4);
    /* the last unit but one: its parameters are still there */
    return (b - 4) * slice + 8 + STEP_WHOLE + ahead + gradient;
}
/* The fewest and the most bytes of a peak, for each element of a unit. */
typedef struct step_peak_range {
    double from, to;
} step_peak_range;
static TE_MAYBE_UNUSED double step_rounding(const step_case *c) {
    const double bytes = 2.0 * (double)(c->width * c->width);
    return (double)taken((size_t)bytes) / bytes;
}
/* A unit too many that is gathered is outside of these: in a forward its parameters, and in a backward pass those less
 * a slice, since the peak is one unit earlier then. Norms and biases, and what the backward functions need, are a fifth
 * of a byte. A GPU's kernels may need half of a unit's gradients; its products of codes may do without columnwise
 * copies, and those of MXFP8 decode a weight into bf16, half a unit's. `slack`: of these, on a GPU. */
static TE_MAYBE_UNUSED step_peak_range step_range(const step_case *c, double want, double activations,
                                                  double slack) {
    const bool gpu = slack > 0, codes = gpu && c->num->stored, pairs = step_gathered(c) == 2;
    want *= step_rounding(c);
    return (step_peak_range){want - (codes && !pairs), want + activations + 0.2 + slack + (codes && pairs)};
}
static TE_MAYBE_UNUSED step_peak_range forward_peaks(const step_case *c, const step_peaks *got, bool gpu) {
    return step_range(c, forward_peak_of(c), got->activations, gpu ? 0.3 : 0);
}
static TE_MAYBE_UNUSED step_peak_range step_peaks_of(const step_case *c, int ranks, const step_peaks *got, bool gpu) {
    const double alive = c->stay ? 1 : 2.0 / STEP_BLOCKS; /* of the activations, at the peak */
    return step_range(c, peak_of(c, ranks), alive * got->activations, gpu ? 0.9 : 0);
}
/* Activations of 32 rows would hide a slice's worth of codes in narrow blocks. */
static TE_MAYBE_UNUSED bool step_checks_step(const step_case *c) {
    return !c->num->stored || (c->shard == TE_SHARD_PARAMETERS && !c->stay && c->width > STEP_WIDTH);
}
static TE_MAYBE_UNUSED bool step_checks_forward(const step_case *c) {
    return c->shard == TE_SHARD_PARAMETERS && !(c->num->stored && c->stay);
}
static TE_MAYBE_UNUSED void expect_peak(rank_state *s, const char *what, double got, step_peak_range want) {
    char text[128];
    if (got >= want.from && got <= want.to) return;
    snprintf(text, sizeof text, "the peak of a %s is %.3f bytes for each element of a unit, not %.3f to %.3f", what,
             got, want.from, want.to);
    wrong(s, text);
}
static TE_MAYBE_UNUSED void step_rank(rank_state *s) {
    const step_case *c = (const step_case *)s->arg;
    const uint64_t n = (uint64_t)s->size, one = (uint64_t)(2 * c->width * c->width), all = STEP_BLOCKS * one;
    const uint64_t code = !c->num->stored ? 2 : c->num->recipe == te_recipe_mxfp8 ? 2 : 1; /* bytes of an element */
    const bool forwards = step_checks_forward(c), steps = step_checks_step(c);
    const double activations = forwards || steps ? (double)step_activations(s, c) / (double)one : 0;
    te_module *m = step_model(s, c, true);
    te_optimizer *opt = te_fused_adam_create(s->te, m, &(te_fused_adam_desc){.lr = 1e-3f});
    for (int step = 0; step < 3; step++) {
        const size_t kept = te_memory_get_stats(s->te).allocated;
        te_group_reset_stats(s->group);
        te_memory_reset_peak(s->te);
        size_t forward = 0;
        EXPECT(s, step_batch(m, c, step * s->size + s->rank, &forward) == TE_OK && te_optimizer_step(opt) == TE_OK);
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
        const step_peaks got = {(double)peak / (double)one, (double)(forward - kept) / (double)one, activations};
        const bool gpu = te_ctx_is_cuda(s->te);
        if (c->peaks) *c->peaks = got;
        if (steps) expect_peak(s, "step", got.step, step_peaks_of(c, s->size, &got, gpu));
        if (forwards) expect_peak(s, "forward", got.forward, forward_peaks(c, &got, gpu));
    }
    te_optimizer_destroy(opt);
    te_module_destroy(m);
}

#endif /* TE_TEST_STEP_H_INCLUDED */
