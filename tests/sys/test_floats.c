/* tests/sys/test_floats.c: flushing of subnormals and rounding modes that other libraries of the process have set: codes, training and sums of groups do not depend on them. */
#include "../dist/ranks.h"

#include <fenv.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

/* ---- how the processor computes ---- */

typedef struct float_mode {
    const char *name;
    unsigned sse; /* bits of MXCSR beside the masks of exceptions */
    uint64_t arm; /* bits of FPCR */
    int rounding; /* of <fenv.h> */
} float_mode;

static const float_mode modes[] = {
    {"flushed to zero", 0x8040, UINT64_C(1) << 24, FE_TONEAREST}, /* FTZ and DAZ; FZ: what a library linked with -ffast-math sets */
    {"rounded up", 0, 0, FE_UPWARD},
    {"rounded down", 0, 0, FE_DOWNWARD},
    {"rounded to zero, flushed", 0x8040, UINT64_C(1) << 24, FE_TOWARDZERO},
};

static uint64_t control(void) {
#if defined(__SSE__)
    return _mm_getcsr() & ~0x3fu; /* without the flags of what has happened */
#elif defined(__aarch64__)
    uint64_t x;
    __asm__ volatile("mrs %0, fpcr" : "=r"(x));
    return x;
#else
    return 0;
#endif
}
static void enter(const float_mode *m) {
    fesetround(m->rounding);
#if defined(__SSE__)
    _mm_setcsr(_mm_getcsr() | m->sse);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(control() | m->arm));
#endif
}
static void leave(void) {
    fesetround(FE_TONEAREST);
#if defined(__SSE__)
    _mm_setcsr(0x1f80);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(UINT64_C(0)));
#endif
}
static void leave_at_end(void *arg) {
    (void)arg;
    leave();
}

enum { ROWS = 192, COLS = 256 };

static int num_quantizers(void) { return 14; }
static te_quantizer_desc quantizer(int i) {
    te_quantizer_desc d = {0};
    d.kind = i < 1 ? TE_QUANT_DELAYED : i < 4 ? TE_QUANT_CURRENT : i < 7 ? TE_QUANT_BLOCK : i < 9 ? TE_QUANT_MXFP8 : TE_QUANT_NVFP4;
    d.current.power_of_two_scales = i == 2;
    d.dtype = i == 3 ? TE_F8E5M2 : TE_DTYPE_NONE;
    d.block.block_scaling_dim = d.kind != TE_QUANT_BLOCK ? 0 : i == 4 ? 1 : 2;
    d.block.fp32_scales = i == 6;
    d.quantization_2d = i == 8 || i == 10 ? TE_ON : TE_DEFAULT;
    d.nvfp4.rht = i == 11 ? TE_ON : TE_DEFAULT;
    d.nvfp4.stochastic_rounding = i == 12 ? TE_ON : TE_DEFAULT;
    d.nvfp4.row_scaled = i == 13;
    if (d.nvfp4.row_scaled) d.usage = TE_ROWWISE;
    return d;
}

/* Subnormal numbers of f32 alone; rows from 2^-149 up to 1; and, so that scales are far from 1, numbers whose amax is 2^100. */
static float *inputs(int kind) {
    float *x = test_normal(ROWS * COLS, 5 + (uint64_t)kind);
    for (int i = 0; i < ROWS * COLS; i++)
        x[i] = (float)ldexp(x[i], kind == 0 ? -140 : kind == 1 ? -149 + i / COLS * 149 / ROWS : kind == 2 ? i % 3 * -60 + 98 : 0);
    return x;
}

typedef struct place {
    const char *device;
    const float_mode *mode; /* NULL: as the process started */
} place;

/* A context that is made in that mode, with threads that are; how the processor computes then. */
static te_ctx *context_in(const place *p, uint64_t *before) {
    if (p->mode) enter(p->mode);
    *before = control();
    return test_context_threads(p->device, 3);
}
static void leave_unchanged(const place *p, uint64_t before) {
    CHECK(control() == before && fegetround() == (p->mode ? p->mode->rounding : FE_TONEAREST));
    leave();
}

/* Codes and scales of x by one quantizer. */
static test_bytes quantized(const place *p, const te_quantizer_desc *desc, te_dtype dtype, const float *x) {
    test_bytes b = {0};
    uint64_t before;
    te_ctx *te = context_in(p, &before);
    te_quantizer *q = te_quantizer_create(te, desc);
    test_put(&b, te_quantize(q, te_tensor_from_f32(te, dtype, SHAPE(ROWS, COLS), x)));
    te_quantizer_destroy(q);
    CHECK_OK(te);
    leave_unchanged(p, before);
    return b;
}

static void codes_in_every_mode(const char *device) {
    test_on_end(leave_at_end, NULL);
    for (int i = 0; i < num_quantizers(); i++)
        for (int kind = 0; kind < 4; kind++)
            for (int bf16 = 0; bf16 < 2; bf16++) {
                if ((2 * kind + bf16 + 3 * i) % test_every_sanitized(4)) continue;
                const float *x = inputs(kind);
                te_quantizer_desc desc = quantizer(i);
                place p = {device, NULL};
                test_case("quantizer %d, input %d, %s", i, kind, bf16 ? "bf16" : "f32");
                test_bytes want = quantized(&p, &desc, bf16 ? TE_BF16 : TE_F32, x);
                CHECK(want.n > ROWS * COLS / 2);
                for (int m = 0; m < COUNT(modes); m++) {
                    test_case("quantizer %d, input %d, %s, %s", i, kind, bf16 ? "bf16" : "f32", modes[m].name);
                    p.mode = &modes[m];
                    test_bytes got = quantized(&p, &desc, bf16 ? TE_BF16 : TE_F32, x);
                    CHECK_SAME("codes and scales", got, want);
                }
            }
}
TE_TEST(codes_do_not_depend_on_flushing_and_rounding) { codes_in_every_mode("cpu"); }
TE_TEST(codes_on_the_gpu_do_not_depend_on_flushing_and_rounding) {
    if (test_no_gpu()) SKIP(test_no_gpu());
    codes_in_every_mode("cuda:0");
}

static float largest(void *user, const float *history, int length) {
    float amax = 0;
    (void)user;
    for (int i = 0; i < length; i++) amax = history[i] > amax ? history[i] : amax;
    return amax;
}
/* Three steps of a layer, the last two launched from a graph: the parameters and scales that come out. */
static test_bytes trained(const place *p, const te_recipe *recipe) {
    test_bytes b = {0};
    uint64_t before;
    te_ctx *te = context_in(p, &before);
    te_transformer_layer_desc layer_desc = {0};
    layer_desc.hidden_size = 64;
    layer_desc.ffn_hidden_size = 96;
    layer_desc.attention.num_attention_heads = 2;
    te_module *layer = te_transformer_layer_create(te, &layer_desc);
    te_fused_adam_desc adam_desc = {0};
    adam_desc.lr = 1e-3f;
    te_optimizer *adam = te_fused_adam_create(te, layer, &adam_desc);
    te_tensor *x = te_tensor_normal(te, TE_BF16, SHAPE(15, 2, 64), 0, 1);
    te_graph *graph = NULL;
    for (int step = 0; step < 2; step++) {
        bool capture = step == 1 && !recipe->delayed.amax_fn; /* functions of the user's compute on the host */
        if (capture) te_graph_begin(te);
        te_scope_begin(te);
        te_tensor *y = test_forward(layer, recipe, x);
        te_backward(te_add(te_mse_loss(y, te_scale(x, 0.5f)), te_mean_all(y)));
        te_optimizer_step(adam);
        te_scope_end(te);
        if (capture) graph = te_graph_end(te);
    }
    for (int launch = 0; graph && launch < 2; launch++) te_graph_launch(graph);
    b = test_content(layer);
    CHECK_OK(te);
    te_graph_destroy(graph);
    te_optimizer_destroy(adam);
    te_module_destroy(layer);
    leave_unchanged(p, before);
    return b;
}

TE_TEST_DEVICES(training_does_not_depend_on_flushing_and_rounding) {
    te_recipe recipes[6] = {te_recipe_current_scaling(), te_recipe_block_scaling(), te_recipe_mxfp8(), te_recipe_nvfp4(), te_recipe_delayed_scaling(),
                            te_recipe_delayed_scaling()};
    recipes[5].delayed.amax_fn = largest;
    test_on_end(leave_at_end, NULL);
    for (int r = 0; r < COUNT(recipes); r++) {
        place p = {te_ctx_device(te), NULL};
        test_bytes want = trained(&p, &recipes[r]);
        CHECK(want.n > 1000);
        for (int m = r % test_every_sanitized(1); m < COUNT(modes); m += test_every_sanitized(1)) {
            test_case("recipe %d, %s", r, modes[m].name);
            p.mode = &modes[m];
            test_bytes got = trained(&p, &recipes[r]);
            CHECK_EQ_INT(got.n, want.n);
            if (got.n == want.n) CHECK_BYTES("parameters", got.data, want.data, want.n);
        }
    }
}

static void reduce_small_numbers(rank_state *s) {
    const float mine[4] = {s->rank ? 0 : 0x1p-140f, s->rank ? 0x1p-149f : 0, s->rank ? 0x1p-24f : 1, s->rank ? -0x1p-24f : -1};
    static const float sums[4] = {0x1p-140f, 0x1p-149f, 1, -1} /* 1 + 2^-24 is a tie */, largest_ones[4] = {0x1p-140f, 0x1p-149f, 1, -0x1p-24f};
    te_tensor *x = te_tensor_from_f32(s->te, TE_F32, SHAPE(4), mine), *y = te_tensor_from_f32(s->te, TE_F32, SHAPE(4), mine);
    float got[4];
    te_all_reduce(s->group, x, TE_REDUCE_SUM);
    te_all_reduce(s->group, y, TE_REDUCE_MAX);
    te_tensor_to_f32(x, got);
    EXPECT(s, memcmp(got, sums, sizeof got) == 0);
    te_tensor_to_f32(y, got);
    EXPECT(s, memcmp(got, largest_ones, sizeof got) == 0);
}
TE_TEST(groups_reduce_alike_in_every_mode) {
    test_on_end(leave_at_end, NULL);
    for (int m = 0; m < COUNT(modes); m++) {
        test_case("%s", modes[m].name);
        enter(&modes[m]);
        run_ranks(2, reduce_small_numbers, NULL);
        leave();
    }
}
