/* test_attn_variants.c: what comes between product and softmax (ALiBi, biases, masks of elements and of blocks, the user's rules) at lengths around and beyond those of tiles, with masks, windows, packed
 * sequences, sinks, dropout and heads of every size: the formula in float64, forward and backward; which kernels a plan names. */
#include "../te_test.h"
#include "attn_formula.h"

typedef struct variant {
    int64_t sizes[4];
    int bias, rule;
    te_attn_mask mask; /* 0: none */
    int layout, softmax, window, dropout, dtype, grouped, blocks, softcap;
    te_dtype bias_dtype, dbias_dtype;
    int repeats;
} variant;

enum { F16 = 1, BF16 = 2 };
static const variant variants[] = {
    {{1, 1, 128, 128}, .bias = BIAS_FULL, .layout = LAYOUT_BSHD},
    {{1, 1000, 128, 128}, .bias = BIAS_ALIBI},
    {{129, 129, 128, 128}, .bias = BIAS_ALIBI, .mask = TE_MASK_CAUSAL, .layout = LAYOUT_BSHD},
    {{17, 129, 128, 128}, .bias = BIAS_SLOPES, .grouped = 1},
    {{1000, 1000, 128, 128}, .bias = BIAS_ALIBI, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD_PADDED, .softmax = TE_SOFTMAX_LEARNABLE},
    {{1000, 129, 128, 128}, .bias = BIAS_SLOPES_OF_EACH, .window = WINDOW_BOTH, .dtype = F16},
    {{127, 1000, 128, 128}, .bias = BIAS_ALIBI, .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT, .dropout = 1, .grouped = 2},
    {{129, 130, 128, 128}, .bias = BIAS_FULL, .mask = TE_MASK_CAUSAL, .layout = LAYOUT_BSHD},
    {{127, 1000, 128, 128}, .bias = BIAS_FULL, .grouped = 1},
    {{1000, 1000, 128, 128}, .bias = BIAS_HEADS, .mask = TE_MASK_CAUSAL, .layout = LAYOUT_BSHD, .grouped = 1},
    {{129, 127, 128, 128}, .bias = BIAS_HEADS, .mask = TE_MASK_CAUSAL, .softmax = TE_SOFTMAX_OFF_BY_ONE},
    {{129, 1000, 128, 128}, .bias = BIAS_KEYS, .layout = LAYOUT_BSHD},
    {{17, 129, 128, 128}, .bias = BIAS_KEYS, .window = WINDOW_LEFT, .dtype = F16},
    {{130, 1000, 128, 128}, .bias = BIAS_PRE, .mask = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT, .layout = LAYOUT_THD, .grouped = 1},
    {{127, 130, 128, 128}, .bias = BIAS_FULL, .bias_dtype = TE_F32, .mask = TE_MASK_CAUSAL},
    {{200, 300, 128, 128}, .bias = BIAS_KEYS, .bias_dtype = TE_F32, .mask = TE_MASK_PADDING},
    {{17, 129, 128, 128}, .bias = BIAS_HEADS, .bias_dtype = TE_F32},
    {{129, 136, 128, 128}, .bias = BIAS_FULL, .bias_dtype = TE_BF16, .dtype = F16, .mask = TE_MASK_CAUSAL},
    {{300, 260, 128, 128}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_H | REPEATS_I, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD},
    {{300, 260, 128, 128}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_I, .grouped = 2, .mask = TE_MASK_CAUSAL},
    {{64, 132, 128, 128}, .bias = BIAS_HEADS, .bias_dtype = TE_F32, .dropout = 1, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD},
    {{129, 130, 128, 128}, .bias = BIAS_FULL, .bias_dtype = TE_BF16, .dtype = F16},
    {{129, 127, 128, 128}, .bias = BIAS_HEADS, .mask = TE_MASK_ARBITRARY, .grouped = 1},
    {{129, 136, 128, 128}, .bias = BIAS_ROWS, .mask = TE_MASK_CAUSAL, .dtype = F16},
    {{300, 520, 128, 128}, .bias = BIAS_SEQUENCES, .layout = LAYOUT_BSHD, .grouped = 1},
    {{17, 8, 128, 128}, .bias = BIAS_FULL},
    {{1000, 136, 128, 128}, .bias = BIAS_HEADS, .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT}, /* tiles without a key */
    {{700, 904, 128, 128}, .bias = BIAS_FULL, .window = WINDOW_BOTH, .dropout = 1, .grouped = 2},
    {{200, 264, 128, 128}, .bias = BIAS_SEQUENCES, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD, .grouped = 1},
    {{1000, 1000, 128, 128}, .bias = BIAS_FULL, .mask = TE_MASK_PADDING, .layout = LAYOUT_THD_PADDED, .softmax = TE_SOFTMAX_LEARNABLE},
    {{129, 136, 128, 128}, .bias = BIAS_ROWS, .rule = RULE_CAP, .mask = TE_MASK_ARBITRARY},
    {{1000, 1000, 128, 128}, .bias = BIAS_ALIBI, .mask = TE_MASK_ARBITRARY},
    {{129, 129, 128, 128}, .rule = RULE_SLOPES, .mask = TE_MASK_CAUSAL, .grouped = 1},
    {{127, 1000, 128, 128}, .rule = RULE_CAP, .layout = LAYOUT_BSHD},
    {{1000, 1000, 128, 128}, .rule = RULE_DOCUMENTS, .mask = TE_MASK_CAUSAL, .grouped = 1},
    {{1000, 1000, 128, 128}, .rule = RULE_BOTH, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD_PADDED},
    {{17, 129, 128, 128}, .rule = RULE_ROWS, .dtype = F16},
    {{129, 17, 128, 128}, .rule = RULE_DOCUMENTS},
    {{64, 132, 128, 128}, .bias = BIAS_HEADS, .rule = RULE_CAP, .softmax = TE_SOFTMAX_LEARNABLE, .dropout = 1},
    {{129, 129, 128, 128}, .bias = BIAS_ALIBI, .rule = RULE_BOTH, .mask = TE_MASK_ARBITRARY},
    {{1100, 1100, 64, 64}, .bias = BIAS_ALIBI, .mask = TE_MASK_CAUSAL, .grouped = 1},
    {{1100, 200, 64, 64}, .bias = BIAS_FULL},
    {{1100, 1100, 64, 64}, .bias = BIAS_SLOPES, .window = WINDOW_BOTH, .grouped = 1},
    {{300, 1000, 64, 64}, .bias = BIAS_HEADS, .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT, .dtype = F16},
    {{129, 127, 64, 64}, .rule = RULE_CAP, .bias = BIAS_KEYS},
    {{200, 132, 64, 64}, .bias = BIAS_HEADS, .mask = TE_MASK_ARBITRARY, .dropout = 1},
    {{129, 300, 64, 64}, .rule = RULE_ROWS, .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT, .bias = BIAS_ALIBI},
    {{129, 130, 96, 96}, .bias = BIAS_HEADS, .mask = TE_MASK_CAUSAL},
    {{200, 136, 96, 96}, .bias = BIAS_ROWS, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD},
    {{200, 129, 96, 96}, .bias = BIAS_ALIBI, .rule = RULE_DOCUMENTS},
    {{129, 130, 192, 128}, .bias = BIAS_HEADS, .mask = TE_MASK_CAUSAL, .grouped = 1},
    {{129, 136, 192, 128}, .bias = BIAS_HEADS, .mask = TE_MASK_CAUSAL, .grouped = 1},
    {{300, 200, 256, 256}, .bias = BIAS_FULL, .mask = TE_MASK_CAUSAL},
    {{200, 200, 192, 192}, .bias = BIAS_ALIBI},
    {{130, 200, 192, 192}, .bias = BIAS_FULL, .mask = TE_MASK_ARBITRARY},
    {{129, 200, 256, 256}, .bias = BIAS_ALIBI, .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT},
    {{129, 200, 256, 256}, .bias = BIAS_HEADS, .rule = RULE_BOTH},
    {{200, 132, 192, 192}, .dropout = 1, .mask = TE_MASK_CAUSAL},
    {{129, 200, 192, 128}, .dropout = 1, .bias = BIAS_ALIBI, .grouped = 1},
    {{200, 333, 96, 96}, .dropout = 1, .mask = TE_MASK_CAUSAL, .dtype = F16},
    {{1100, 1101, 64, 64}, .dropout = 1, .mask = TE_MASK_CAUSAL, .grouped = 1, .layout = LAYOUT_BSHD},
    {{1000, 1001, 128, 128}, .dropout = 1, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD_PADDED, .softmax = TE_SOFTMAX_LEARNABLE},
    {{257, 1100, 128, 128}, .dropout = 1, .window = WINDOW_BOTH, .grouped = 2},
    {{1, 130, 128, 128}, .dropout = 1},
    {{257, 391, 192, 128}, .dropout = 1, .mask = TE_MASK_PADDING, .layout = LAYOUT_THD},
    {{140, 97, 192, 192}, .dropout = 1, .window = WINDOW_LEFT},
    {{130, 300, 256, 256}, .dropout = 1, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD},
    {{17, 129, 256, 256}, .bias = BIAS_SLOPES, .grouped = 1},
    {{300, 300, 192, 192}, .bias = BIAS_ALIBI, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD_PADDED, .softmax = TE_SOFTMAX_LEARNABLE},
    {{200, 129, 256, 256}, .bias = BIAS_SLOPES_OF_EACH, .window = WINDOW_BOTH, .dtype = F16},
    {{129, 130, 192, 192}, .bias = BIAS_FULL, .bias_dtype = TE_F32, .mask = TE_MASK_CAUSAL, .layout = LAYOUT_BSHD, .grouped = 1},
    {{200, 132, 256, 256}, .bias = BIAS_HEADS, .bias_dtype = TE_F32, .dropout = 1, .grouped = 1},
    {{130, 300, 256, 256}, .bias = BIAS_PRE, .mask = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT, .layout = LAYOUT_THD, .grouped = 1},
    {{300, 200, 256, 256}, .bias = BIAS_KEYS, .mask = TE_MASK_PADDING},
    {{129, 127, 192, 128}, .bias = BIAS_KEYS, .window = WINDOW_LEFT, .dtype = F16},
    {{200, 129, 256, 256}, .bias = BIAS_HEADS, .mask = TE_MASK_ARBITRARY, .grouped = 1},
    {{129, 129, 256, 256}, .rule = RULE_SLOPES, .mask = TE_MASK_CAUSAL, .grouped = 1},
    {{127, 300, 256, 256}, .rule = RULE_CAP, .layout = LAYOUT_BSHD},
    {{200, 132, 256, 256}, .rule = RULE_CAP, .dropout = 1, .mask = TE_MASK_CAUSAL, .grouped = 1},
    {{64, 132, 192, 192}, .bias = BIAS_HEADS, .rule = RULE_CAP, .softmax = TE_SOFTMAX_LEARNABLE, .dropout = 1},
    {{300, 300, 192, 128}, .rule = RULE_DOCUMENTS, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD},
    {{129, 17, 256, 256}, .rule = RULE_ROWS, .dtype = F16},
    {{129, 129, 192, 192}, .bias = BIAS_ALIBI, .rule = RULE_BOTH, .mask = TE_MASK_ARBITRARY},
    {{1000, 1000, 128, 128}, .blocks = 1, .mask = TE_MASK_CAUSAL, .layout = LAYOUT_BSHD, .grouped = 1},
    {{300, 4000, 128, 128}, .blocks = 2},
    {{300, 130, 128, 128}, .blocks = 1, .grouped = 2},
    {{129, 129, 128, 128}, .blocks = 2},
    {{1000, 1000, 128, 128}, .blocks = 1, .rule = RULE_DOCUMENTS, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD_PADDED, .softmax = TE_SOFTMAX_LEARNABLE},
    {{300, 700, 128, 128}, .blocks = 2, .rule = RULE_ROWS, .bias = BIAS_HEADS, .dropout = 1, .grouped = 1},
    {{300, 704, 128, 128}, .blocks = 2, .bias = BIAS_FULL, .grouped = 1},
    {{700, 300, 128, 128}, .blocks = 1, .bias = BIAS_ALIBI, .window = WINDOW_LEFT},
    {{140, 140, 128, 128}, .blocks = 1, .rule = RULE_BOTH, .mask = TE_MASK_ARBITRARY},
    {{1100, 500, 64, 64}, .blocks = 1, .grouped = 1},
    {{129, 130, 64, 64}, .blocks = 2, .rule = RULE_DOCUMENTS, .bias = BIAS_KEYS},
    {{129, 300, 192, 192}, .blocks = 1},
    {{300, 300, 256, 256}, .blocks = 1, .mask = TE_MASK_CAUSAL},
    {{129, 150, 192, 128}, .blocks = 1, .rule = RULE_DOCUMENTS},
    {{1, 129, 128, 128}, .softcap = 1},
    {{129, 130, 128, 128}, .softcap = 1, .mask = TE_MASK_CAUSAL, .layout = LAYOUT_BSHD, .grouped = 1},
    {{1000, 1000, 128, 128}, .softcap = 1, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD_PADDED, .grouped = 2},
    {{127, 1000, 128, 128}, .softcap = 1, .window = WINDOW_BOTH, .softmax = TE_SOFTMAX_LEARNABLE, .dtype = F16},
    {{64, 132, 128, 128}, .softcap = 1, .dropout = 1, .mask = TE_MASK_CAUSAL},
    {{300, 260, 128, 128}, .softcap = 1, .blocks = 1, .mask = TE_MASK_ARBITRARY},
    {{129, 129, 128, 128}, .softcap = 1, .rule = RULE_BOTH},
    {{1100, 1100, 64, 64}, .softcap = 1, .mask = TE_MASK_CAUSAL, .grouped = 1},
    {{129, 64, 64, 64}, .softcap = 1, .dropout = 1, .softmax = TE_SOFTMAX_OFF_BY_ONE},
    {{129, 100, 64, 64}, .softcap = 1, .mask = TE_MASK_PADDING, .layout = LAYOUT_THD},
    {{130, 129, 96, 96}, .softcap = 1, .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT},
    {{129, 140, 192, 128}, .softcap = 1, .mask = TE_MASK_CAUSAL, .grouped = 1},
    {{140, 129, 192, 192}, .softcap = 1, .dtype = F16, .softmax = TE_SOFTMAX_LEARNABLE},
    {{129, 130, 256, 256}, .softcap = 1, .mask = TE_MASK_CAUSAL, .window = WINDOW_LEFT, .grouped = 1},
    {{1000, 1000, 256, 256}, .softcap = 1, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD_PADDED},
    {{132, 128, 256, 256}, .softcap = 1, .dropout = 1},
    {{300, 1000, 128, 128}, .softcap = 2, .grouped = 1},
    {{1000, 1000, 128, 128}, .softcap = 2, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD_PADDED, .dtype = F16},
    {{1100, 1100, 64, 64}, .softcap = 2, .mask = TE_MASK_CAUSAL, .grouped = 1},
    {{129, 300, 256, 256}, .softcap = 2, .mask = TE_MASK_PADDING, .layout = LAYOUT_THD},
    {{600, 600, 256, 256}, .blocks = 1, .mask = TE_MASK_CAUSAL, .layout = LAYOUT_BSHD, .grouped = 1},
    {{300, 700, 192, 192}, .blocks = 2, .rule = RULE_ROWS, .bias = BIAS_HEADS, .dropout = 1, .grouped = 1},
    {{700, 300, 256, 256}, .blocks = 1, .bias = BIAS_ALIBI, .window = WINDOW_LEFT},
    {{500, 500, 192, 192}, .blocks = 1, .rule = RULE_DOCUMENTS, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD_PADDED, .softmax = TE_SOFTMAX_LEARNABLE},
    {{140, 140, 256, 256}, .blocks = 1, .rule = RULE_BOTH, .mask = TE_MASK_ARBITRARY},
    /* The gradient of a bias that repeats in every way, over several tiles: with masks, packed sequences, windows, dropout and rules, in every format; sums of one part and of several, of one pair of
     * tiles and of several. */
    {{300, 260, 128, 128}, .bias = BIAS_FULL, .bias_dtype = TE_F32, .layout = LAYOUT_BSHD},
    {{300, 260, 128, 128}, .bias = BIAS_HEADS, .mask = TE_MASK_CAUSAL, .grouped = 1},
    {{300, 264, 128, 128}, .bias = BIAS_FULL, .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT, .dbias_dtype = TE_F16},
    {{300, 260, 128, 128}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_H, .window = WINDOW_BOTH, .dtype = F16},
    {{300, 260, 128, 128}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_B | REPEATS_H, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD_PADDED, .softmax = TE_SOFTMAX_LEARNABLE},
    {{300, 260, 128, 128}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_I, .dropout = 1},
    {{300, 260, 128, 128}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_H | REPEATS_I, .mask = TE_MASK_ARBITRARY, .layout = LAYOUT_BSHD},
    {{300, 260, 128, 128}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_B | REPEATS_I, .rule = RULE_CAP, .grouped = 2},
    {{300, 260, 128, 128}, .bias = BIAS_KEYS, .bias_dtype = TE_F32, .dropout = 1, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD, .softmax = TE_SOFTMAX_LEARNABLE},
    {{300, 261, 128, 128}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_B | REPEATS_H},
    {{257, 259, 128, 128}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_B | REPEATS_I, .bias_dtype = TE_F32, .window = WINDOW_LEFT},
    {{100, 260, 128, 128}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_I},
    {{300, 260, 128, 128}, .bias = BIAS_HEADS, .dbias_dtype = TE_F32, .dropout = 1, .mask = TE_MASK_PADDING},
    {{300, 260, 128, 128}, .bias = BIAS_FULL, .bias_dtype = TE_F32, .dbias_dtype = TE_BF16, .mask = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT, .layout = LAYOUT_THD},
    {{300, 260, 128, 128}, .bias = BIAS_PRE, .bias_dtype = TE_F32, .rule = RULE_BOTH, .mask = TE_MASK_CAUSAL},
    {{300, 259, 128, 128}, .bias = BIAS_FULL, .bias_dtype = TE_F32, .mask = TE_MASK_ARBITRARY, .grouped = 1},
    {{300, 260, 128, 128}, .bias = BIAS_HEADS, .blocks = 1, .rule = RULE_DOCUMENTS, .grouped = 1},
    {{300, 260, 128, 128}, .bias = BIAS_KEYS, .blocks = 2, .mask = TE_MASK_CAUSAL},
    {{1000, 1000, 128, 128}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_B | REPEATS_H, .mask = TE_MASK_CAUSAL, .grouped = 1},
    {{1000, 1000, 64, 64}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_B | REPEATS_H, .bias_dtype = TE_F32, .grouped = 1},
    {{1100, 1104, 64, 64}, .bias = BIAS_HEADS, .mask = TE_MASK_CAUSAL, .grouped = 1},
    {{2100, 1000, 64, 64}, .bias = BIAS_KEYS, .mask = TE_MASK_CAUSAL, .grouped = 1},
    {{300, 260, 96, 64}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_H, .mask = TE_MASK_CAUSAL},
    {{300, 260, 40, 40}, .bias = BIAS_HEADS, .rule = RULE_ROWS, .dropout = 1, .grouped = 1},
    {{70, 90, 64, 64}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_H, .dbias_dtype = TE_F32, .mask = TE_MASK_CAUSAL},
    {{70, 92, 64, 64}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_H | REPEATS_I, .dropout = 1},
    {{70, 90, 64, 64}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_B | REPEATS_H, .mask = TE_MASK_PADDING_CAUSAL, .layout = LAYOUT_THD},
    {{70, 90, 64, 64}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_B | REPEATS_I, .bias_dtype = TE_F32},
};

static xcase case_of(const variant *v) {
    int option[OPTIONS] = {0};
    option[MASK] = v->mask ? v->mask - TE_MASK_NONE : 0;
    option[LAYOUT] = v->layout;
    option[BIAS] = v->bias;
    option[SOFTMAX] = v->softmax;
    option[WINDOW] = v->window;
    option[DTYPE] = v->dtype ? v->dtype : BF16;
    option[GROUPED] = v->grouped;
    option[DROPOUT] = v->dropout;
    option[SOFTCAP] = v->softcap;
    xcase c = make_sized_case(option, v->sizes);
    if (v->bias_dtype) c.bias_dtype = v->bias_dtype;
    c.dbias_dtype = v->dbias_dtype;
    c.repeats = v->repeats;
    c.rule = v->rule;
    c.blocks = v->blocks;
    return c;
}

/* On the CPU small ones alone: it has no tiles. */
static void check_variants(te_ctx *te, int share) {
    te_tensor *zero = te_tensor_zeros(te, TE_BF16, SHAPE(4, 1, 1, 64));
    te_attn_desc d = {.rule.score_mod = {.score_mod = "score", .score_fn = score_fn}};
    const bool compiles = !te_ctx_is_cuda(te) || te_attention(zero, zero, zero, &d) != NULL; /* NVRTC is there */
    te_clear_error(te);
    int small = 0;
    for (int n = share; n < COUNT(variants); n += 4) {
        xcase c = case_of(&variants[n]);
        if (!te_ctx_is_cuda(te) && (c.s_q * c.s_kv > 20000 || small++ % test_every_odd(8))) continue;
        if (c.rule && !compiles) continue;
        check_case(te, &c);
    }
}
TE_TEST_DEVICES(attn_variants_0) { check_variants(te, 0); }
TE_TEST_DEVICES(attn_variants_1) { check_variants(te, 1); }
TE_TEST_DEVICES(attn_variants_2) { check_variants(te, 2); }
TE_TEST_DEVICES(attn_variants_3) { check_variants(te, 3); }

/* A bias of -infinity hides keys: every third one, or all of a sequence, and with them the last keys of a tile. */
static void check_infinite(te_ctx *te, const variant *v, bool all) {
    xcase c = case_of(v);
    xsums sum;
    int64_t s[4];
    name_case(&c);
    bias_shape(&c, s);
    xdata in = make_data(&c);
    for (int64_t n = 0; n < bias_count(&c); n++)
        if (n % s[3] % 3 == 0 || (all && n < s[3])) in.bias[n] = -INFINITY;
    xdata want = reference(&c, &in, &sum), got = run(te, &c, &in);
    compare(&c, &got, &want);
}
TE_TEST_DEVICES(attn_variants_infinite_bias) {
    static const variant cases[] = {
        {{300, 260, 128, 128}, .bias = BIAS_KEYS},
        {{300, 260, 64, 64}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_H | REPEATS_I, .mask = TE_MASK_CAUSAL},
        {{130, 264, 128, 128}, .bias = BIAS_ROWS, .mask = TE_MASK_CAUSAL},
        {{60, 70, 128, 128}, .bias = BIAS_KEYS, .bias_dtype = TE_F32},
    };
    for (int n = 0; n < COUNT(cases); n++) {
        if (!te_ctx_is_cuda(te) && n != COUNT(cases) - 1) continue; /* small ones alone */
        check_infinite(te, &cases[n], n == 1);
    }
}

/* Capped scores are finite, and those of empty blocks stay hidden. Small enough for the CPU. */
TE_TEST_DEVICES(attn_softcap_beside_a_block_mask) {
    const variant v = {{70, 260, 64, 64}, .softcap = 1, .blocks = 1, .mask = TE_MASK_ARBITRARY};
    xcase c = case_of(&v);
    check_case(te, &c);
}

/* Under a cap this small nearly all scores are at it, where the derivative is 0: one out of P and its row's logarithm is
 * off by 0.5. */
TE_TEST_DEVICES(attn_softcap_tiny) {
    const variant v = {{70, 90, 64, 64}, .softcap = 1, .mask = TE_MASK_CAUSAL};
    xcase c = case_of(&v);
    c.softcap = 1e-6f;
    check_case(te, &c);
}

/* Hopper's kernels add no bias and no ALiBi behind a cap, so such calls have others. */
TE_TEST(attn_softcap_plans) {
    static const struct {
        int bias;
        const char *forward, *backward, *why;
    } cases[] = {{BIAS_NONE, "attn/attn_fwd_hopper", "attn/attn_bwd_hopper", "TMA and wgmma"},
                 {BIAS_FULL, "attn/attn_fwd_mma", "attn/attn_bwd_dkv", "a soft cap beside a bias or ALiBi"},
                 {BIAS_ALIBI, "attn/attn_fwd_mma", "attn/attn_bwd_dkv", "a soft cap beside a bias or ALiBi"}};
    te_ctx *te = test_context("cpu");
    for (int n = 0; n < COUNT(cases); n++) {
        const variant v = {{33, 40, 128, 128}, .softcap = 1, .bias = cases[n].bias};
        xcase c = case_of(&v);
        te_explanation e;
        name_case(&c);
        xdata in = make_data(&c);
        xtensors t = make_tensors(te, &c, &in);
        CHECK(te_explain(te, TE_OP_ATTN_FWD, &t.f, "sm_90", &e) == TE_OK && e.deterministic);
        CHECK_STR(e.kernels, cases[n].forward);
        CHECK_STR(e.kernels, "X_CAP=1");
        CHECK_STR(e.why, cases[n].why);
        CHECK(te_explain(te, TE_OP_ATTN_BWD, &t.g, "sm_90", &e) == TE_OK && e.deterministic);
        CHECK_STR(e.kernels, cases[n].backward);
        CHECK_STR(e.why, cases[n].why);
        CHECK(te_explain(te, TE_OP_ATTN_BWD, &t.g, "sm_80", &e) == TE_OK && e.deterministic);
        CHECK_STR(e.kernels, n ? "attn/attn_bwd_dkv" : "attn/attn_bwd_dkv_mma");
    }
    for (int n = 0; n < 4; n++) { /* caps too small for the backward kernels of tensor cores; the least that they have */
        const variant v = {{33, 40, n % 2 ? 128 : 64, n % 2 ? 128 : 64}, .softcap = 1};
        xcase c = case_of(&v);
        te_explanation e;
        c.softcap = n < 2 ? 0.00999f : 0.01f;
        name_case(&c);
        xdata in = make_data(&c);
        xtensors t = make_tensors(te, &c, &in);
        CHECK(te_explain(te, TE_OP_ATTN_FWD, &t.f, "sm_90", &e) == TE_OK && e.deterministic);
        CHECK_STR(e.kernels, "attn/attn_fwd_hopper");
        CHECK_STR(e.why, "TMA and wgmma");
        CHECK(te_explain(te, TE_OP_ATTN_BWD, &t.g, "sm_90", &e) == TE_OK && e.deterministic);
        CHECK_STR(e.kernels, n < 2 ? "attn/attn_bwd_dkv." : "attn/attn_bwd_hopper");
        CHECK_STR(e.why, n < 2 ? "general kernels, in f32, and not tensor cores: gradients under a soft cap below 0.01" : "TMA and wgmma");
        CHECK(te_explain(te, TE_OP_ATTN_BWD, &t.g, "sm_80", &e) == TE_OK && e.deterministic);
        CHECK_STR(e.kernels, n < 2 ? "attn/attn_bwd_dkv." : "attn/attn_bwd_dkv_mma");
        CHECK_STR(e.why, n < 2 ? "gradients under a soft cap below 0.01" : "the chip is no Hopper");
    }
    te_op_attn_fwd_args a = {.q = te_tensor_zeros(te, TE_F32, SHAPE(2, 1, 1, 4))};
    a.k = a.v = a.q, a.o = te_tensor_zeros(te, TE_F32, SHAPE(2, 1, 1, 4));
    for (int n = 0; n < 4; n++) {
        a.rule.softcap = n == 0 ? -2.0f : n == 1 ? NAN : n == 2 ? INFINITY : 2.0f;
        a.rule.core_attention_bias_type = n == 3 ? TE_ATTN_BIAS_PRE_SCALE : TE_ATTN_BIAS_NONE;
        a.rule.core_attention_bias = n == 3 ? te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 2, 2)) : NULL;
        te_op_attn_fwd(te, &a);
        if (n < 3) CHECK_ERROR(te, TE_ERR_INVALID, n == 0 ? "attn_fwd: softcap is -2; it is positive, or 0 for none" : "attn_fwd: softcap is");
        else CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "softcap 2 with TE_ATTN_BIAS_PRE_SCALE");
    }
}

/* Hopper's forward kernel adds a bias that more than one tile of queries shares by a product. */
static bool has_keys(const xcase *c) {
    int64_t s[4];
    bias_shape(c, s);
    return has_bias(c) && s[2] == 1 && c->s_q > 128;
}
/* TMA can bring the bias: one of 16 bits with a row for each query. */
static bool in_tiles(const xcase *c) {
    int64_t s[4];
    bias_shape(c, s);
    return has_bias(c) && s[2] > 1 && c->bias_dtype != TE_F32 && c->s_kv % 8 == 0;
}
/* The first of `kernels` has the case's options, and none but these. */
static void check_options(const xcase *c, const char *kernels, bool forward) {
    const bool keys = forward && has_keys(c);
    const struct {
        const char *name;
        bool wanted;
    } options[] = {{"X_MOD=", c->rule != 0}, {"X_BIAS=", has_bias(c) && !keys}, {"X_KEYS=", keys}, {"X_ALIBI=", has_alibi(c)}, {"X_MASK=", c->mask == TE_MASK_ARBITRARY}, {"X_CAP=", c->softcap > 0}, {"X_BLOCKS=", c->blocks != 0}};
    const char *const end = kernels + strcspn(kernels, " ");
    for (int i = 0; i < COUNT(options); i++) {
        const char *const at = strstr(kernels, options[i].name);
        CHECK_MSG((at && at < end) == options[i].wanted, "%s: %s", options[i].name, kernels);
    }
}

/* All of them run on Hopper's kernels, and elsewhere on those of mma.sync, which have no rules of the user's. */
TE_TEST(attn_variants_plans) {
    te_ctx *te = test_context("cpu");
    int small = 0;
    for (int n = 0; n < COUNT(variants); n++) {
        xcase c = case_of(&variants[n]);
        te_explanation e;
        name_case(&c);
        if (c.s_q * c.s_kv > 20000 || small++ % test_every_odd(3)) continue;
        xdata in = make_data(&c);
        xtensors t = make_tensors(te, &c, &in);
        CHECK(te_explain(te, TE_OP_ATTN_FWD, &t.f, "sm_90", &e) == TE_OK && e.supported && e.deterministic);
        CHECK_STR(e.kernels, "attn/attn_fwd_hopper");
        CHECK_MSG(!strstr(e.kernels, "attn/attn_dropout_bits") == !variants[n].dropout, "%s", e.kernels);
        CHECK_MSG(!strstr(e.kernels, "attn/attn_bias_line") == !has_keys(&c), "%s", e.kernels);
        CHECK_STR(e.why, "TMA and wgmma");
        const char *const forward = strstr(e.kernels, "attn/attn_fwd_hopper");
        if (forward) check_options(&c, forward, true);
        const bool room = c.d != 192 || c.d_v != 128, tiles = in_tiles(&c); /* of shared memory */
        CHECK_MSG(!strstr(e.kernels, "X_TILES") == !(tiles && room), "%s", e.kernels);
        CHECK(te_explain(te, TE_OP_ATTN_BWD, &t.g, "sm_90", &e) == TE_OK && e.supported && e.deterministic);
        CHECK_STR(e.why, "TMA and wgmma");
        for (int k = 0; k < (c.d <= 128 ? 1 : 2); k++) {
            const char *const name = c.d <= 128 ? "attn/attn_bwd_hopper" : k ? "attn/attn_bwd_dq_hopper" : "attn/attn_bwd_dkv_hopper", *const begin = strstr(e.kernels, name);
            CHECK_STR(e.kernels, name);
            if (begin) check_options(&c, begin, false);
        }
        CHECK_MSG(!strstr(e.kernels, "X_TILES") == !(tiles && c.d <= 128), "%s", e.kernels);
        if (has_bias(&c)) {
            int64_t s[4];
            bias_shape(&c, s);
            const bool sums = c.d <= 128 && s[2] == 1 && (s[1] == 1 || c.heads == c.groups); /* of dK's kernel */
            CHECK_MSG(!strstr(e.kernels, "X_SUMS=1") == !sums, "%s", e.kernels);
            CHECK_STR(e.kernels, sums ? "attn/attn_bwd_bias_put" : "attn/attn_bwd_bias_hopper");
            CHECK_MSG(!strstr(e.kernels, "attn/attn_bwd_bias_hopper") == sums, "%s", e.kernels);
            CHECK(te_explain(te, TE_OP_ATTN_BWD, &t.g, "sm_80", &e) == TE_OK && e.supported && e.deterministic);
            CHECK_STR(e.kernels, "attn/attn_bwd_bias.");
        }
        CHECK(te_explain(te, TE_OP_ATTN_FWD, &t.f, "sm_80", &e) == TE_OK && e.supported && e.deterministic);
        CHECK_STR(e.why, c.rule ? "and not tensor cores: the user's rule" : c.bias_dtype != c.dtype && c.bias_dtype != TE_F32 ? "and not tensor cores: a bias of the other" : "the chip is no Hopper");
    }
}

/* The gradient of a bias has the same bits in each run: its sums have one order, whichever block draws a tile. */
TE_TEST_DEVICES(attn_variants_dbias_same_bits) {
    static const variant again[] = {
        {{300, 260, 128, 128}, .bias = BIAS_HEADS, .mask = TE_MASK_CAUSAL, .grouped = 1},
        {{300, 260, 128, 128}, .bias = BIAS_KEYS, .dropout = 1},
        {{300, 260, 128, 128}, .bias = BIAS_FULL, .repeats = REPEATS | REPEATS_B | REPEATS_H, .bias_dtype = TE_F32},
    };
    for (int n = 0; n < COUNT(again); n++) {
        xcase c = case_of(&again[n]);
        if (!te_ctx_is_cuda(te)) c.s_q = c.length_q[0] = c.length_q[1] = 40;
        name_case(&c);
        xdata in = make_data(&c), a = run(te, &c, &in);
        for (int round = 0; round < 3; round += test_every_sanitized(2)) {
            xdata b = run(te, &c, &in);
            CHECK_BYTES("dbias", a.dbias, b.dbias, (size_t)bias_count(&c) * 4);
        }
    }
}

/* Hopper's kernel writes the gradient of a bias in every format that it can have. */
TE_TEST(attn_variants_dbias_formats) {
    te_ctx *te = test_context("cpu");
    static const variant v = {{70, 90, 64, 64}, .bias = BIAS_HEADS};
    const xcase c = case_of(&v);
    static const te_dtype formats[3] = {TE_F32, TE_BF16, TE_F16};
    te_explanation e;
    name_case(&c);
    xdata in = make_data(&c);
    xtensors t = make_tensors(te, &c, &in);
    for (int k = 0; k < 3; k++) {
        t.g.dbias = te_tensor_describe(te, formats[k], 4, (const int64_t[]){1, c.heads, c.s_q, c.s_kv});
        CHECK(te_explain(te, TE_OP_ATTN_BWD, &t.g, "sm_90", &e) == TE_OK && e.supported && e.deterministic);
        CHECK_STR(e.kernels, "attn/attn_bwd_bias_hopper");
        CHECK_STR(e.why, "TMA and wgmma");
    }
}
