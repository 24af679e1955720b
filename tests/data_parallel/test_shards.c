/* test_shards.c: units whose optimizer states, gradients or parameters are sharded over ranks equal those that are
 * whole, and cost the memory that api/sharding.h says. */
#include "../faults/purse.h"
#include "shards.h"

/* ---- sharded equals whole ---- */

static void equal_rank(rank_state *s) {
    const shard_case *c = (const shard_case *)s->arg;
    /* The sums of ranks have one order, so bits are equal. With clipping the norm of slices is the norm of norms: its
     * last bits differ, by 1e-7; Adam divides nearly equal moments by each other, and rounding to 8 or 4 bits may go
     * the other way. */
    const double limit = !c->clip ? 0 : c->num->stored ? 5e-3 : c->num->dtype == TE_F32 ? 1e-5 : 2e-3;
    te_module *whole = make_model(s->te, c), *m[2];
    te_optimizer *adam = NULL, *opt[2];
    te_grad_scaler *scaler[3] = {NULL};
    make_units(s, whole, c, TE_SHARD_NONE);
    adam = make_optimizer(s->te, whole, c);
    for (int k = 0; k < 2; k++) {
        m[k] = make_model(s->te, c);
        make_units(s, m[k], c, k ? TE_SHARD_PARAMETERS : TE_SHARD_OPTIMIZER);
        opt[k] = make_optimizer(s->te, m[k], c);
    }
    for (int k = 0; k < 3 && c->scale; k++)
        scaler[k] = te_grad_scaler_create(s->te, &(te_grad_scaler_desc){.init_scale = 1024, .growth_interval = 1});
    for (int step = 0; step < TB_STEPS; step++) {
        EXPECT(s, run_step(s, whole, adam, c, step, scaler[2]) == TE_OK);
        for (int k = 0; k < 2; k++) {
            EXPECT(s, run_step(s, m[k], opt[k], c, step, scaler[k]) == TE_OK);
            expect_same(s, m[k], whole, limit);
            expect_states(s, opt[k], m[k], adam, whole, limit);
        }
    }
    for (int k = 0; k < 2; k++) {
        if (c->clip)
            EXPECT(s, same_values(te_optimizer_grad_norm(opt[k]), te_optimizer_grad_norm(adam),
                                  c->num->dtype == TE_F32 ? 1e-6 : 1e-2));
        te_optimizer_destroy(opt[k]);
        te_module_destroy(m[k]);
        te_grad_scaler_destroy(scaler[k]);
    }
    te_grad_scaler_destroy(scaler[2]);
    te_optimizer_destroy(adam);
    te_module_destroy(whole);
}
static void equal_case(int size, const char *name, shard_case c) {
    static int turn;
    if (turn++ % test_every_odd(1)) return; /* builds that sample take every third call */
    if (!c.num) c.num = &numbers[0];
    if (!c.width) c.width = test_samples() ? 32 : 64;
    if (!c.inner) c.inner = test_samples() ? 80 : 160;
    test_case("%d ranks, %s, %s", size, c.num->name, name);
    run_ranks(size, equal_rank, &c);
}
TE_TEST(shards_equal_whole_in_every_recipe) {
    for (int i = 0; i < COUNT(numbers); i++)
        for (int size = 2; size <= 4; size += 2)
            if ((i + size / 2) % test_every_sanitized(2) == 0)
                equal_case(size, "as it is", (shard_case){.num = &numbers[i]});
}
TE_TEST(shards_equal_whole_with_options) {
    const number_case *f32 = &numbers[0], *bf16 = &numbers[1], *current = &numbers[6], *mxfp8 = &numbers[8];
    equal_case(1, "alone", (shard_case){.num = bf16});
    equal_case(8, "many", (shard_case){.num = bf16});
    equal_case(8, "many", (shard_case){.num = mxfp8});
    equal_case(3, "sizes that ranks do not divide", (shard_case){.num = f32, .width = 13, .inner = 7});
    equal_case(4, "sizes that ranks do not divide", (shard_case){.num = bf16, .width = 21, .inner = 35});
    equal_case(3, "rows that ranks do not divide, padded", (shard_case){.num = current, .width = 40, .inner = 50});
    equal_case(2, "initial values kept", (shard_case){.num = current, .preserve = true});
    equal_case(2, "checkpoints", (shard_case){.num = bf16, .checkpoint = true});
    equal_case(2, "checkpoints", (shard_case){.num = mxfp8, .checkpoint = true});
    equal_case(2, "gathered until backward", (shard_case){.num = bf16, .keep_gathered = true});
    equal_case(2, "a factor of its own", (shard_case){.num = f32, .divide = 1.5f});
    equal_case(2, "SGD", (shard_case){.num = bf16, .sgd = true});
    equal_case(2, "remainders", (shard_case){.num = bf16, .remainders = true});
    equal_case(2, "moments in bf16", (shard_case){.num = bf16, .moments = TE_BF16});
    equal_case(2, "main gradients", (shard_case){.num = bf16, .main_grads = true});
    equal_case(2, "one unit", (shard_case){.num = f32, .one_unit = true});
    equal_case(2, "frozen weights", (shard_case){.num = bf16, .frozen = true});
    equal_case(2, "frozen weights", (shard_case){.num = current, .frozen = true});
}
/* On a GPU: the kernels of whole tensors and of slices compute alike. */
TE_TEST_DEVICES(shards_equal_whole_on_devices) {
    static const int some[] = {1, 3, 5, 6, 7, 8, 9, 10, 11, 12};
    for (int i = 0; i < COUNT(some); i++) {
        const shard_case c = {.num = &numbers[some[i]], .width = 128, .inner = 256};
        if (!te_ctx_is_cuda(te) && i > 0) break; /* the tests above have the others */
        test_case("%s", c.num->name);
        run_ranks_on(te_ctx_is_cuda(te) ? "cuda:0" : "cpu", false, 2, equal_rank, &c);
    }
}
TE_TEST(shards_clip_by_the_norm_of_all_slices) {
    equal_case(2, "clipped", (shard_case){.num = &numbers[0], .clip = true});
    equal_case(4, "clipped", (shard_case){.num = &numbers[1], .clip = true});
    equal_case(2, "clipped", (shard_case){.num = &numbers[6], .clip = true});
    equal_case(2, "clipped SGD", (shard_case){.num = &numbers[0], .clip = true, .sgd = true});
    equal_case(2, "scaled", (shard_case){.num = &numbers[2], .scale = true});
    equal_case(2, "scaled", (shard_case){.num = &numbers[6], .scale = true});
    equal_case(2, "scaled and clipped", (shard_case){.num = &numbers[0], .scale = true, .clip = true});
}

/* ---- memory ---- */

static int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
/* The formula of api/sharding.h for what a rank keeps between steps of a plain bf16 model under Adam with masters. */
static size_t kept_bytes(rank_state *s, te_module *m, te_shard shard) {
    param_list l = {0};
    size_t all = 0;
    te_module_visit_tensors(m, list_param, &l);
    for (int i = 0; i < l.n; i++) {
        const int64_t n = te_tensor_numel(l.list[i]), chunk = up(up(n, s->size) / s->size, 8),
                      first = chunk * s->rank < n ? chunk * s->rank : n;
        const int64_t own = shard == TE_SHARD_NONE ? n : first + chunk < n ? chunk : n - first;
        all += 3 * taken((size_t)own * 4);                            /* exp_avg, exp_avg_sq, master_param */
        if (shard < TE_SHARD_PARAMETERS) all += taken((size_t)n * 2); /* the parameter */
    }
    for (int u = 0; u < te_module_num_children(m) && shard == TE_SHARD_PARAMETERS;
         u++) { /* the slices of a unit lie in one tensor */
        const bool root = u == 0 || u == te_module_num_children(m) - 1;
        int64_t block = 0;
        if (u == te_module_num_children(m) - 1) continue;
        for (int k = 0; k < l.n; k++) {
            const bool of_root = k < 2 || k >= l.n - 2; /* weight and bias of the first and the last Linear */
            if (root ? of_root : !of_root && (k - 2) / 6 == u - 1)
                block += up(up(up(te_tensor_numel(l.list[k]), s->size) / s->size, 8) * 2, 16);
        }
        all += taken((size_t)block);
    }
    return all;
}
static void memory_rank(rank_state *s) {
    const shard_case *c = (const shard_case *)s->arg;
    for (int shard = TE_SHARD_NONE; shard <= TE_SHARD_PARAMETERS; shard++) {
        te_memory_trim(s->te);
        const size_t before = te_memory_get_stats(s->te).allocated;
        te_module *m = make_model(s->te, c);
        make_units(s, m, c, (te_shard)shard);
        te_optimizer *opt = make_optimizer(s->te, m, c);
        for (int step = 0; step < 2; step++) {
            EXPECT(s, run_step(s, m, opt, c, step, NULL) == TE_OK);
            const size_t kept = te_memory_get_stats(s->te).allocated - before, want = kept_bytes(s, m, (te_shard)shard);
            if (kept != want) wrong(s, "memory between steps is not that of the formula");
        }
        te_optimizer_destroy(opt);
        te_module_destroy(m);
        EXPECT(s, te_memory_get_stats(s->te).allocated == before);
    }
}
TE_TEST(shards_keep_the_memory_of_the_formula) {
    const shard_case c = {.num = &numbers[1], .width = 72, .inner = 200};
    for (int size = 2; size <= 4; size += 2) {
        test_case("%d ranks", size);
        run_ranks(size, memory_rank, &c);
    }
}

/* The most that a step takes beyond what is there between steps, for a model of `blocks` blocks, each a unit. */
static size_t step_peak(rank_state *s, const number_case *num, int blocks, int64_t width, te_shard shard,
                        int checkpoint) {
    te_recipe recipe = num->recipe();
    te_module *m = te_module_create(s->te, &chain, "deep");
    const te_data_parallel_desc d = {.group = s->group, .shard = shard};
    const shard_case c = {.num = num, .width = width};
    te_seed(s->te, 3);
    if (num->stored) te_quantized_model_init_begin(s->te, &(te_quantized_model_init_desc){.recipe = &recipe});
    for (int i = 0; i < blocks; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        te_module *block = te_module_add_child(
            m, name,
            te_layernorm_mlp_create(s->te, &(te_layernorm_mlp_desc){.hidden_size = width,
                                                                    .ffn_hidden_size = width,
                                                                    .gemm.params_dtype = num->dtype}));
        te_module_set_checkpoint(block, checkpoint == 1);
        EXPECT(s, te_fsdp_unit(block, &d) == TE_OK);
    }
    te_module_set_checkpoint(m, checkpoint == 2); /* over all units */
    if (num->stored) te_quantized_model_init_end(s->te);
    te_optimizer *opt = te_fused_adam_create(s->te, m, &(te_fused_adam_desc){.lr = 1e-3f});
    size_t most = 0;
    for (int step = 0; step < 2; step++) {
        const size_t kept = te_memory_get_stats(s->te).allocated;
        te_memory_reset_peak(s->te);
        EXPECT(s, run_batch(m, &c, step * s->size + s->rank, NULL) == TE_OK && te_optimizer_step(opt) == TE_OK);
        const size_t peak = te_memory_get_stats(s->te).peak_allocated - kept;
        if (step > 0 && peak > most) most = peak; /* the first step makes scaling state that stays */
    }
    te_optimizer_destroy(opt);
    te_module_destroy(m);
    return most;
}
/* Blocks of 2 w^2 elements, and few rows: activations are small beside them. */
static void peak_rank(rank_state *s) {
    const number_case *num = (const number_case *)s->arg;
    const int64_t w = 256;
    const int few_blocks = 3, many_blocks = test_samples() ? 5 : 9, others = many_blocks - few_blocks;
    const size_t unit = (size_t)(2 * w * w), slices = 2 * unit / (size_t)s->size;
    for (int checkpoint = 0; checkpoint < 2; checkpoint++) {
        const size_t few = step_peak(s, num, few_blocks, w, TE_SHARD_PARAMETERS, checkpoint),
                     many = step_peak(s, num, many_blocks, w, TE_SHARD_PARAMETERS, checkpoint);
        /* The peak is the exchange of the last unit: its gradients in 16 bits, once more while they are computed, f32
         * rows for all ranks and the sum of one; the slices of all gradients; and the parameters of the next unit, which
         * are gathered ahead, at most 16 bits. 3 parts in 100: norms, biases, blocks of the pool. */
        EXPECT(s, many <= (unit * (2 + 2 + 4 + 2) + 4 * unit / (size_t)s->size + many_blocks * slices) * 103 / 100);
        EXPECT(s, many <= few + others * slices * 105 / 100); /* the depth of the model costs slices alone */
    }
    if (num->dtype == TE_BF16 && !num->autocast) { /* one checkpoint over all units: its gradients wait for its end */
        const size_t few = step_peak(s, num, few_blocks, w, TE_SHARD_PARAMETERS, 2),
                     many = step_peak(s, num, many_blocks, w, TE_SHARD_PARAMETERS, 2);
        EXPECT(s, many <= few + others * 2 * unit * 105 / 100); /* and its parameters do not */
    }
    EXPECT(s, step_peak(s, num, many_blocks, w, TE_SHARD_NONE, false) > many_blocks * 2 * unit); /* whole gradients */
}
TE_TEST(shards_of_parameters_need_one_or_two_units) {
    static const int some[] = {1, 3, 6, 8};
    for (int i = 0; i < COUNT(some); i += test_every_sanitized(2)) {
        test_case("%s", numbers[some[i]].name);
        run_ranks(test_samples() ? 2 : 4, peak_rank, &numbers[some[i]]);
    }
}

/* ---- values, by hand ---- */

/* Parameters that ranks write while they are gathered keep the values; units that are taken back have whole parameters.
 */
static void values_rank(rank_state *s) {
    const shard_case c = {.num = &numbers[s->size == 2 ? 6 : 1], .width = 64, .inner = 96};
    te_module *m = make_model(s->te, &c), *like = make_model(s->te, &c);
    te_tensor *bias, *w = te_module_parameter(te_module_child(m, 1), "fc1_weight"),
                     *same = te_module_parameter(te_module_child(like, 1), "fc1_weight");
    te_fsdp_slice slice;
    EXPECT(s, !te_fsdp_get_slice(w, NULL));
    make_units(s, m, &c, TE_SHARD_PARAMETERS);
    bias = te_module_parameter(te_module_child(m, 1), "fc1_bias");
    EXPECT(s, te_fsdp_get_slice(bias, &slice) && slice.shard == TE_SHARD_PARAMETERS && slice.group == s->group &&
                  !slice.grad && slice.length == (96 / s->size < 24 ? 24 : 96 / s->size));
    EXPECT(s, te_tensor_data(bias) == NULL && te_fsdp_unshard(m) == TE_OK && te_tensor_data(bias) != NULL);
    te_tensor_fill(bias, 7);
    if (c.num->stored) { /* a new value for a weight that is stored quantized */
        te_recipe recipe = c.num->recipe();
        te_quantizer *q = te_quantizer_create(s->te, &(te_quantizer_desc){.kind = TE_QUANT_CURRENT});
        te_seed(s->te, 5);
        te_tensor *x = te_tensor_normal(s->te, TE_BF16, SHAPE(96, 64), 0, 1);
        EXPECT(s, te_quantize_into(q, x, w, NULL) == TE_OK && te_quantize_into(q, x, same, NULL) == TE_OK);
        te_quantizer_destroy(q);
        (void)recipe;
    } else {
        te_tensor_fill(w, 3);
        te_tensor_fill(same, 3);
    }
    EXPECT(s, te_fsdp_reshard(m) == TE_OK && te_tensor_data(bias) == NULL);
    te_tensor_fill(te_module_parameter(te_module_child(like, 1), "fc1_bias"), 7);
    expect_same(s, m, like, 0);
    /* an optimizer's masters begin with these values */
    te_optimizer *adam[2] = {make_optimizer(s->te, m, &c), NULL};
    make_units(s, like, &c, TE_SHARD_NONE);
    adam[1] = make_optimizer(s->te, like, &c);
    for (int step = 0; step < 2; step++) {
        EXPECT(s,
               run_step(s, m, adam[0], &c, step, NULL) == TE_OK && run_step(s, like, adam[1], &c, step, NULL) == TE_OK);
        EXPECT(s, te_fsdp_unshard(m) == TE_OK); /* the step releases them */
        te_tensor_fill(bias, 5);                /* which a master takes over */
        te_tensor_fill(te_module_parameter(te_module_child(like, 1), "fc1_bias"), 5);
        EXPECT(s, te_fsdp_get_slice(bias, &slice) && !slice.grad);
    }
    for (int i = 0; i < TB_BLOCKS; i++) EXPECT(s, te_fsdp_unit(te_module_child(m, 1 + i), NULL) == TE_OK);
    EXPECT(s, te_fsdp_unit(m, NULL) == TE_OK && !te_fsdp_get_slice(w, NULL) && te_tensor_data(bias) != NULL);
    expect_same(s, m, like, 0);
    EXPECT(s, te_forward(m, te_tensor_full(s->te, c.num->dtype, SHAPE(TB_ROWS, 64), 1)) != NULL);
    te_optimizer_destroy(adam[0]);
    te_optimizer_destroy(adam[1]);
    te_module_destroy(m);
    te_module_destroy(like);
}
TE_TEST(shards_take_values_of_the_program) {
    run_ranks(2, values_rank, NULL);
    run_ranks(4, values_rank, NULL);
}

TE_TEST(shards_of_units_that_not_all_ranks_reach) {
    for (int shard = TE_SHARD_NONE; shard <= TE_SHARD_OPTIMIZER; shard++)
        for (int size = 2; size <= 4; size++) {
            const uneven_case arg = {(te_shard)shard, size == 3 ? TE_BF16 : TE_F32};
            test_case("%d ranks, shard %d, %s", size, shard, te_dtype_name(arg.dtype));
            run_ranks(size, uneven_rank, &arg);
        }
}

/* ---- failures of one rank ---- */

typedef struct fail_case {
    te_shard shard;
    int phase;       /* 0: the forward, 1: the backward pass, 2: the step, 3: as 2 with clipping and stored weights */
    int64_t request; /* which request of memory of rank 1 fails in the phase */
    int *reached;    /* the request was made */
} fail_case;
static void fail_rank(rank_state *s) {
    const fail_case *f = (const fail_case *)s->arg;
    const shard_case c = {.num = &numbers[f->phase == 3 ? 6 : 1], .width = 32, .inner = 32, .clip = f->phase == 3};
    te_module *m = make_model(s->te, &c);
    te_result result = TE_OK;
    make_units(s, m, &c, f->shard);
    te_optimizer *opt = make_optimizer(s->te, m, &c);
    te_tensor *x = te_tensor_full(s->te, TE_BF16, SHAPE(4, 32), 1), *loss = NULL;
    te_recipe recipe = c.num->recipe();
    for (int phase = 0; phase < 3 && result == TE_OK; phase++) {
        const int64_t before = s->requests;
        s->fail_at = s->rank == 1 && phase == (f->phase < 3 ? f->phase : 2) ? before + f->request : 0;
        if (phase == 0) {
            if (c.num->autocast) te_autocast_begin(s->te, &(te_autocast_desc){.recipe = &recipe});
            te_tensor *y = te_forward(m, x);
            result = y ? TE_OK : te_error_code(s->te);
            if (s->rank == 1 && s->fail_at) *f->reached = s->requests >= s->fail_at;
            s->fail_at = 0;
            if (c.num->autocast) te_autocast_end(s->te);
            loss = y ? te_mean_all(te_activate(y, TE_GELU, NULL)) : NULL;
        } else
            result = phase == 1 ? te_backward(loss) : te_optimizer_step(opt);
        if (s->rank == 1 && s->fail_at) *f->reached = s->requests >= s->fail_at;
        s->fail_at = 0;
    }
    /* rank 1 fails, or went on without that memory; rank 0 hears of it in this phase or the next */
    s->failed = result != TE_OK;
    if (result != TE_OK && s->rank == 0) EXPECT(s, strstr(te_error(s->te), "rank 1"));
    te_clear_error(s->te);
    te_optimizer_destroy(opt);
    te_module_destroy(m);
}
/* Each request of memory of a phase fails once: no rank waits for ever, and if rank 0 fails, it names rank 1. */
TE_TEST(shards_fail_together) {
    const int stride = test_every_odd(4);
    for (int shard = TE_SHARD_NONE; shard <= TE_SHARD_PARAMETERS; shard++)
        for (int phase = 0; phase < 4; phase++) {
            int reached = 1, failures = 0;
            if (shard == TE_SHARD_NONE && phase != 1) continue; /* nothing is exchanged there */
            for (int64_t request = 1; reached; request += stride) {
                const fail_case f = {(te_shard)shard, phase, request, &reached};
                test_case("shard %d, phase %d, request %lld", shard, phase, (long long)request);
                reached = 0;
                rank_state *s = run_ranks(2, fail_rank, &f);
                CHECK(s[1].failed || !s[0].failed);
                failures += s[1].failed;
            }
            CHECK_MSG(failures > 5 / stride, "%d failures", failures);
        }
}

/* ---- what is refused ---- */

static te_result own_exchange(void *user, te_module *unit) { return (void)user, (void)unit, TE_OK; }
static te_module *plain_model(te_ctx *te) {
    const shard_case c = {.num = &numbers[1], .width = 16, .inner = 32};
    return make_model(te, &c);
}
TE_TEST(shards_refuse) {
    te_ctx *te = test_context("cpu");
    te_scope_begin(te);
    te_data_parallel_desc d = {.shard = (te_shard)3, .no_init_sync = true};
    te_module *m = plain_model(te), *block = te_module_child(m, 1);
    te_tensor *w = te_module_parameter(block, "fc1_weight"), *x = te_tensor_full(te, TE_BF16, SHAPE(4, 16), 1);
    CHECK_EQ_INT(te_fsdp_unit(m, &d), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "shard is 3");
    d.shard = TE_SHARD_OPTIMIZER;
    d.post_backward = own_exchange;
    CHECK_EQ_INT(te_fsdp_unit(m, &d), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "shard is 1 and post_backward is given");
    d.post_backward = NULL;
    CHECK_EQ_INT(te_fsdp_unit(m, &d), TE_OK);
    CHECK_EQ_INT(te_fsdp_unit(block, &d), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "of unit \"block0\" is sharded by unit \"model\" too");
    d.shard = TE_SHARD_PARAMETERS;
    CHECK_EQ_INT(te_fsdp_unit(m, &d), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "is a unit with shard 1 already, and shard 2 is asked for");
    CHECK_EQ_INT(te_fsdp_unit(m, NULL), TE_OK);
    /* formats with one scale for all of a parameter */
    CHECK_EQ_INT(te_fsdp_unit(m, &d), TE_OK);
    CHECK(!te_fused_adam_create(te, m, &(te_fused_adam_desc){.exp_avg_dtype = TE_F16}));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "is sharded, and the format of \"exp_avg\" is f16");
    /* reading what is not gathered; a module of the unit gathers it */
    CHECK_EQ_INT(te_tensor_fill(w, 1), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "a sharded parameter");
    CHECK(te_forward(block, x) != NULL);
    CHECK_OK(te);
    /* new values for what is not gathered, or in another format */
    CHECK_EQ_INT(te_module_reset_parameters(m), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "\"weight\" of \"first\" is a sharded parameter");
    CHECK(te_fsdp_unshard(m) == TE_OK && te_module_reset_parameters(m) == TE_OK && te_fsdp_reshard(m) == TE_OK);
    CHECK(te_cast_model_to_dtype(m, &(te_cast_model_desc){.dtype = TE_F32}) != TE_OK);
    CHECK_ERROR(te, TE_ERR_STATE, "a cast from bf16 to f32 of a sharded parameter");
    /* gradients that were not exchanged */
    te_optimizer *adam = te_fused_adam_create(te, m, NULL);
    te_fsdp_set_state(m, (te_fsdp_state){.reshard_after_backward = true});
    CHECK_EQ_INT(te_backward(te_mean_all(te_forward(m, x))), TE_OK);
    CHECK_EQ_INT(te_optimizer_step(adam), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "its gradient was not exchanged");
    CHECK(!te_clip_grad_norm(m, 1));
    CHECK_ERROR(te, TE_ERR_STATE, "te_clip_grad_norm: parameter first.weight is sharded");
    CHECK_EQ_INT(te_fsdp_post_backward(m), TE_OK);
    /* parameters that came later */
    te_fsdp_set_state(m, (te_fsdp_state){.reshard_after_backward = true, .requires_gradient_sync = true});
    te_module *late =
        te_module_add_child(m, "late", te_linear_create(te, &(te_linear_desc){.in_features = 16, .out_features = 16}));
    CHECK(te_backward(te_mean_all(te_forward(m, x))) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "trained parameter 23 of 24 was added");
    te_module_destroy(late);
    /* the optimizer's unit is taken back */
    CHECK_EQ_INT(te_fsdp_unit(m, NULL), TE_OK);
    CHECK_EQ_INT(te_optimizer_step(adam), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "was taken back; make the optimizer after the units");
    te_optimizer_destroy(adam);
    adam = te_fused_adam_create(te, m, NULL);
    CHECK_EQ_INT(te_fsdp_unit(m, &d), TE_OK);
    CHECK_EQ_INT(te_optimizer_step(adam), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "was sharded by unit \"model\" after the optimizer was made");
    te_optimizer_destroy(adam);
    te_module_destroy(m);
    /* codes of two kinds */
    te_quantizer_desc parts[2] = {{.kind = TE_QUANT_CURRENT}, {.kind = TE_QUANT_BLOCK}},
                      both = {.kind = TE_QUANT_HYBRID};
    both.hybrid.rowwise_quantizer = &parts[0];
    both.hybrid.columnwise_quantizer = &parts[1];
    te_quantizer *q = te_quantizer_create(te, &both);
    m = te_module_create(te, &chain, "mixed");
    te_module_add_parameter(m, "weight", te_quantize(q, te_tensor_full(te, TE_BF16, SHAPE(32, 32), 1)));
    te_tensor_set_requires_grad(te_module_parameter(m, "weight"), true);
    CHECK_EQ_INT(te_fsdp_unit(m, &d), TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "parameter \"weight\" of unit \"mixed\" is hybrid");
    te_module_destroy(m);
    te_quantizer_destroy(q);
    te_scope_end(te);
}

/* ---- what is refused in graphs; test_shard_processes.c has what is not ---- */

static te_graph *nested; /* NULL: nesting_forward begins a graph, else it launches this one */
static te_result nesting_forward(te_module *m, te_forward_args *args) {
    te_ctx *te = te_module_ctx(m);
    te_tensor *y = te_forward(te_module_child(m, 0), args->input);
    const te_result result = nested ? te_graph_launch(nested) : te_graph_begin(te);
    args->outputs.out = y;
    return result;
}
static const te_module_class nesting = {"Nesting", 0, nesting_forward, NULL, NULL};
TE_TEST_DEVICES(graphs_of_shards_refuse) {
    te_tensor *x = te_tensor_full(te, TE_BF16, SHAPE(32, 32), 1);
    for (int shard = TE_SHARD_OPTIMIZER; shard <= TE_SHARD_PARAMETERS; shard++) {
        const te_data_parallel_desc d = {.shard = (te_shard)shard};
        const shard_case c = {.num = &numbers[6], .width = 32, .inner = 64};
        te_recipe recipe = te_recipe_current_scaling();
        te_module *m = make_model(te, &c), *first = te_module_child(m, 0);
        CHECK_EQ_INT(te_fsdp_unit(m, &d), TE_OK);
        te_optimizer *adam = te_fused_adam_create(te, m, NULL);
        te_grad_scaler *scaler = te_grad_scaler_create(te, NULL);
        for (int turn = 0; turn < 2; turn++) { /* whether codes stay is what the host decides */
            if (turn) te_graph_begin(te);
            te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
            te_tensor *y = te_forward(m, x);
            te_autocast_end(te);
            CHECK_EQ_INT(te_backward(te_grad_scaler_scale(scaler, te_mean_all(y))), TE_OK);
            CHECK_EQ_INT(te_grad_scaler_step(scaler, adam), turn ? TE_ERR_STATE : TE_OK);
        }
        CHECK_ERROR(te, TE_ERR_STATE, "te_grad_scaler_step of sharded weights that are stored quantized");
        CHECK(!te_graph_end(te));
        te_clear_error(te);
        te_grad_scaler_destroy(scaler);
        /* a capture that has failed leaves neither gradients nor parameters */
        te_fsdp_slice slice;
        CHECK(te_fsdp_get_slice(te_module_parameter(first, "weight"), &slice) && !slice.grad);
        te_memory_trim(te);
        te_optimizer_destroy(adam);
        te_module_destroy(m);
        /* a parameter that this rank has no gradient of */
        const shard_case plain = {.num = &numbers[1], .width = 32, .inner = 64};
        m = make_model(te, &plain);
        first = te_module_child(m, 0);
        CHECK_EQ_INT(te_fsdp_unit(m, &d), TE_OK);
        CHECK_EQ_INT(te_graph_begin(te), TE_OK);
        CHECK_EQ_INT(te_backward(te_mean_all(te_forward(first, x))), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, "the exchange of a parameter's gradient, which this rank does not have,");
        CHECK(!te_graph_end(te));
        te_clear_error(te);
        CHECK(te_fsdp_get_slice(te_module_parameter(first, "weight"), &slice) && !slice.grad);
        /* gradients from before, not exchanged and exchanged */
        te_fsdp_set_state(m, (te_fsdp_state){.reshard_after_backward = true});
        CHECK_EQ_INT(te_backward(te_mean_all(te_forward(m, x))), TE_OK);
        te_fsdp_set_state(m, (te_fsdp_state){.reshard_after_backward = true, .requires_gradient_sync = true});
        CHECK_EQ_INT(te_graph_begin(te), TE_OK);
        CHECK_EQ_INT(te_backward(te_mean_all(te_forward(m, x))), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, "the exchange of a sharded gradient from before");
        CHECK(!te_graph_end(te));
        te_clear_error(te);
        te_module_zero_grad(m);
        adam = te_fused_adam_create(te, m, NULL);
        CHECK_EQ_INT(te_backward(te_mean_all(te_forward(m, x))), TE_OK);
        CHECK_EQ_INT(te_graph_begin(te), TE_OK);
        CHECK_EQ_INT(te_optimizer_step(adam), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, "te_optimizer_step with a gradient from before");
        CHECK(!te_graph_end(te));
        te_clear_error(te);
        te_module_zero_grad(m);
        /* the unit is taken back */
        CHECK_EQ_INT(te_graph_begin(te), TE_OK);
        CHECK_EQ_INT(te_fsdp_unit(m, NULL), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, "make units before te_graph_begin");
        CHECK(!te_graph_end(te));
        te_clear_error(te);
        CHECK_EQ_INT(te_graph_begin(te), TE_OK);
        CHECK_EQ_INT(te_backward(te_mean_all(te_forward(m, x))), TE_OK);
        te_graph *g = te_graph_end(te);
        CHECK_EQ_INT(te_graph_launch(g), TE_OK);
        CHECK_EQ_INT(te_fsdp_unit(m, NULL), TE_OK);
        CHECK_EQ_INT(te_graph_launch(g), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, "te_graph_launch: a sharded unit that it uses was taken back");
        te_graph_destroy(g);
        te_optimizer_destroy(adam);
        te_module_destroy(m);
    }
    /* graphs inside of a unit's forward */
    te_module *outer = te_module_create(te, &nesting, "outer"),
              *inner = te_module_add_child(
                  outer, "inner", te_linear_create(te, &(te_linear_desc){.in_features = 32, .out_features = 32}));
    CHECK_EQ_INT(te_fsdp_unit(outer, &(te_data_parallel_desc){.shard = TE_SHARD_PARAMETERS}), TE_OK);
    CHECK_EQ_INT(te_make_graphed_callables(te, &inner, &(te_forward_args){.input = x}, 1, NULL), TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "parameter weight of \"inner\" is sharded");
    te_no_grad_begin(te);
    CHECK(!te_forward(outer, x));
    CHECK_ERROR(te, TE_ERR_STATE, "te_graph_begin: inside of a forward of unit \"outer\"");
    te_graph_begin(te);
    te_forward(inner, x);
    nested = te_graph_end(te);
    CHECK(!te_forward(outer, x));
    CHECK_ERROR(te, TE_ERR_STATE, "te_graph_launch: inside of a forward of unit \"outer\"");
    CHECK_EQ_INT(te_graph_launch(nested), TE_OK);
    te_no_grad_end(te);
    te_graph_destroy(nested);
    nested = NULL;
    te_module_destroy(outer);
}
/* Two steps of one optimizer in a graph: the second one is the first to need the second unit, whose masters stay those
 * of the launches all the same. */
static void step_by_turns(te_module *m, te_optimizer *adam, te_tensor *x) {
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < 2; i++)
            te_fsdp_set_state(te_module_child(m, i), (te_fsdp_state){.reshard_after_backward = true,
                                                                     .requires_gradient_sync = i == turn});
        te_tensor *y = te_activate(te_forward(te_module_child(m, turn), x), TE_GELU, NULL);
        CHECK_EQ_INT(te_backward(te_mean_all(y)), TE_OK);
        CHECK_EQ_INT(te_optimizer_step(adam), TE_OK);
        te_module_zero_grad(m);
    }
}
TE_TEST_DEVICES(graph_of_two_steps_of_shards) {
    float master[2][2][16 * 16];
    for (int graph = 0; graph < 2; graph++) {
        te_module *m = te_sequential_create(te, NULL, 0);
        te_seed(te, 5);
        for (int i = 0; i < 2; i++) {
            te_linear_desc d = {.in_features = 16, .out_features = 16, .gemm.params_dtype = TE_BF16};
            te_module *fc = te_module_add_child(m, i ? "b" : "a", te_linear_create(te, &d));
            CHECK_EQ_INT(te_fsdp_unit(fc, &(te_data_parallel_desc){.shard = TE_SHARD_PARAMETERS}), TE_OK);
        }
        te_optimizer *adam = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-4f}); /* less than bf16 holds */
        te_tensor *x = te_tensor_normal(te, TE_BF16, SHAPE(8, 16), 0, 1);
        step_by_turns(m, adam, x);
        te_graph *g = NULL;
        if (graph) {
            CHECK_EQ_INT(te_graph_begin(te), TE_OK);
            step_by_turns(m, adam, x);
            g = te_graph_end(te);
        }
        for (int i = 0; i < 4; i++) {
            if (graph) CHECK_EQ_INT(te_graph_launch(g), TE_OK);
            else step_by_turns(m, adam, x);
        }
        for (int i = 0; i < 2; i++) {
            te_tensor *weight = te_module_parameter(te_module_child(m, i), "weight");
            te_tensor_to_f32(te_optimizer_state(adam, weight, "master_param", NULL), master[graph][i]);
        }
        te_graph_destroy(g);
        te_optimizer_destroy(adam);
        te_module_destroy(m);
    }
    CHECK_BYTES("masters", master[1], master[0], sizeof master[0]);
}
/* A group of threads queues nothing. */
static void captures_in_threads(rank_state *s) {
    te_tensor *x = te_tensor_full(s->te, TE_BF16, SHAPE(32, 32), 1);
    for (int shard = TE_SHARD_OPTIMIZER; shard <= TE_SHARD_PARAMETERS; shard++) {
        const shard_case c = {.num = &numbers[1], .width = 32, .inner = 64};
        te_module *m = make_model(s->te, &c);
        make_units(s, m, &c, (te_shard)shard);
        EXPECT(s, te_graph_begin(s->te) == TE_OK);
        te_tensor *y = te_forward(m, x);
        EXPECT(s, !y == (shard == TE_SHARD_PARAMETERS) && (!y || te_backward(te_mean_all(y)) == TE_ERR_STATE));
        EXPECT(s, strstr(te_error(s->te), "over group \"threads\", which does not queue its work on the stream"));
        EXPECT(s, !te_graph_end(s->te));
        te_clear_error(s->te);
        te_module_destroy(m);
    }
}
TE_TEST(graphs_of_shards_over_threads) { run_ranks(2, captures_in_threads, NULL); }

/* Where memory runs out in a capture, neither gradients nor parameters of launches are left, and the next capture
 * trains as if there had been none. */
static te_result step_of_graph(te_module *m, te_optimizer *adam, te_tensor *x) {
    const te_result result = te_backward(te_mean_all(te_forward(m, x)));
    return result == TE_OK ? te_optimizer_step(adam) : result;
}
TE_TEST(graphs_of_shards_without_memory) {
    for (int shard = TE_SHARD_OPTIMIZER; shard <= TE_SHARD_PARAMETERS; shard++) {
        const shard_case c = {.num = &numbers[1], .width = 16, .inner = 32};
        uint16_t want[16 * 16], got[16 * 16];
        for (int64_t fail = 0, more = 1; more; fail += fail ? test_every_sanitized(5) : 1) {
            purse p = {0};
            te_ctx_desc desc = purse_desc(&p, NULL);
            te_ctx *te = te_ctx_create(&desc);
            test_case("shard %d, request %d", shard, (int)fail);
            te_module *m = make_model(te, &c), *first = te_module_child(m, 0);
            te_tensor *x = te_tensor_retain(te_tensor_full(te, TE_BF16, SHAPE(4, 16), 1));
            for (int i = 0; i < TB_BLOCKS; i++)
                te_fsdp_unit(te_module_child(m, 1 + i), &(te_data_parallel_desc){.shard = (te_shard)shard});
            te_fsdp_unit(m, &(te_data_parallel_desc){.shard = (te_shard)shard});
            te_optimizer *adam = te_fused_adam_create(te, m, NULL);
            CHECK_EQ_INT(step_of_graph(m, adam, x), TE_OK);
            REQUIRE_OK(te);
            p.fail_at = fail ? p.calls + fail : 0;
            if (te_graph_begin(te) == TE_OK) step_of_graph(m, adam, x);
            te_graph *g = te_graph_end(te);
            more = !fail || p.refused;
            p.fail_at = 0;
            te_clear_error(te);
            te_fsdp_slice slice;
            CHECK(te_fsdp_get_slice(te_module_parameter(first, "weight"), &slice) && !slice.grad);
            if (!g) {
                te_module_zero_grad(m);
                CHECK_EQ_INT(te_graph_begin(te), TE_OK);
                CHECK_EQ_INT(step_of_graph(m, adam, x), TE_OK);
                g = te_graph_end(te);
            }
            CHECK_EQ_INT(te_graph_launch(g), TE_OK);
            CHECK_EQ_INT(te_fsdp_unshard(m), TE_OK);
            te_tensor_to_host(te_module_parameter(first, "weight"), fail ? got : want);
            if (fail) CHECK_BYTES("weight", got, want, sizeof want);
            CHECK_OK(te);
            te_graph_destroy(g);
            te_optimizer_destroy(adam);
            te_tensor_release(x);
            te_module_destroy(m);
            te_ctx_destroy(te);
            CHECK_MSG(p.blocks == 0, "%d blocks are left", (int)p.blocks);
        }
    }
}
