/* FP8 attention of DotProductAttention and MultiheadAttention: every value is, bit for bit, that of quantizers at TransformerEngine's points around the plain operations;
 * scales and histories hold what the points saw; what it refuses. */
#include "../te_test.h"

enum { H = 4, G = 2, B = 2, MOST_STEPS = 3 };

typedef struct problem {
    te_recipe recipe;
    te_dtype dtype;
    te_qkv_format format;
    int64_t s, d;
} problem;

enum { Q, K, V, DO, INPUTS, O = INPUTS, DQ, DK, DV, TENSORS };
static int64_t heads_of(int part) { return part == K || part == V || part == DK || part == DV ? G : H; }
static int shape_of(const problem *p, int part, int64_t shape[4]) {
    if (p->format == TE_THD) {
        shape[0] = B * p->s;
        shape[1] = heads_of(part);
        shape[2] = p->d;
        return 3;
    }
    shape[p->format == TE_BSHD] = p->s;
    shape[p->format != TE_BSHD] = B;
    shape[2] = heads_of(part);
    shape[3] = p->d;
    return 4;
}
/* Of packed sequences: one shorter than the other, and the last tokens of none. */
static te_tensor *starts_of(te_ctx *te, const problem *p) { return test_i32(te, SHAPE(B + 1), (const int64_t[]){0, p->s - 5, 2 * p->s - 3}); }
static te_tensor *input_of(te_ctx *te, const problem *p, int part, int step) {
    int64_t shape[4];
    int n = shape_of(p, part, shape);
    float *x = test_normal(test_numel(n, shape), (uint64_t)(10 * step + part));
    for (int64_t i = 0; i < test_numel(n, shape); i++) x[i] *= (float)(1 + step);
    return test_tensor(te, p->dtype, n, shape, x);
}

/* The slots, by TransformerEngine's numbers. */
enum { QKV = 2, OUT = 3, S = 8, SLOTS = 9, DQKV = 0, DOUT = 3, DP = 5, DSLOTS = 6 };
typedef struct scales {
    float forward[SLOTS], backward[DSLOTS];
} scales;
typedef struct outcome {
    test_bytes x[TENSORS];
    scales amax; /* of what the slots saw in the reference; 0: nothing */
} outcome;

static te_dtype codes_of(const problem *p, bool backward) { return backward && p->recipe.kind != TE_RECIPE_MXFP8 ? TE_F8E5M2 : TE_F8E4M3; }

static test_bytes bytes_of(te_tensor *x) {
    test_bytes b = {0};
    test_put(&b, x);
    return b;
}

/* ---- the points, written down again ---- */

static te_tensor *through(te_ctx *te, te_tensor *x, const te_quantizer_desc *desc) {
    te_quantizer *q = te_quantizer_create(te, desc);
    te_tensor *y = te_dequantize(te_quantize(q, x), TE_DTYPE_NONE);
    te_quantizer_destroy(q);
    return y;
}
/* By a given scale; *amax becomes the largest of itself and x. */
static te_tensor *by_scale(te_ctx *te, te_tensor *x, te_dtype codes, float scale, float *amax) {
    te_quantizer_desc d = {0};
    d.kind = TE_QUANT_DELAYED;
    d.dtype = codes;
    d.usage = TE_ROWWISE;
    d.delayed.scale = te_tensor_full(te, TE_F32, SHAPE(1), (double)scale);
    d.delayed.amax = te_tensor_full(te, TE_F32, SHAPE(1), (double)*amax);
    x = through(te, x, &d);
    *amax = test_read(d.delayed.amax)[0];
    return x;
}
static te_tensor *by_blocks(te_ctx *te, te_tensor *x, te_dtype codes, int usage) {
    te_quantizer_desc d = {0};
    d.kind = TE_QUANT_MXFP8;
    d.dtype = codes;
    d.usage = usage;
    return through(te, x, &d);
}
/* v by blocks along the sequence: [b, h, s, d] by columns. */
static te_tensor *along_sequence(te_ctx *te, const problem *p, te_tensor *x, te_dtype codes) {
    x = te_tensor_transpose(p->format == TE_SBHD ? te_tensor_transpose(x, 0, 1) : x, 1, 2);
    x = te_tensor_transpose(by_blocks(te, te_tensor_contiguous(x), codes, TE_COLUMNWISE), 1, 2);
    return te_tensor_contiguous(p->format == TE_SBHD ? te_tensor_transpose(x, 0, 1) : x);
}
static float largest_of(te_tensor *x) {
    const float *values = test_read(x);
    float top = 0;
    for (int64_t k = 0; k < te_tensor_numel(x); k++) top = fmaxf(top, fabsf(values[k]));
    return top;
}
/* Returns the scale of all three. */
static float three(te_ctx *te, const problem *p, te_tensor *x[3], bool backward, float scale, float *amax) {
    const te_dtype codes = codes_of(p, backward);
    if (p->recipe.kind == TE_RECIPE_CURRENT) { /* one scale for all three */
        float top = 0;
        for (int i = 0; i < 3; i++) top = fmaxf(top, largest_of(x[i]));
        scale = (codes == TE_F8E5M2 ? 57344.0f : 448.0f) / top;
    }
    float unused = 0;
    for (int i = 0; i < 3; i++) {
        if (p->recipe.kind != TE_RECIPE_MXFP8) x[i] = by_scale(te, x[i], codes, scale, p->recipe.kind == TE_RECIPE_DELAYED ? amax : &unused);
        else x[i] = i == 2 ? along_sequence(te, p, x[i], codes) : by_blocks(te, x[i], codes, TE_ROWWISE);
    }
    return scale;
}
static te_tensor *one(te_ctx *te, const problem *p, te_tensor *x, bool backward, float scale, float *amax) {
    te_quantizer_desc d = {0};
    if (p->recipe.kind == TE_RECIPE_DELAYED) return by_scale(te, x, codes_of(p, backward), scale, amax);
    if (p->recipe.kind == TE_RECIPE_MXFP8) return by_blocks(te, x, codes_of(p, backward), TE_ROWWISE);
    d.kind = TE_QUANT_CURRENT;
    d.dtype = codes_of(p, backward);
    d.usage = TE_ROWWISE;
    return through(te, x, &d);
}

/* The same codes, of one scale, and their factor: te_op_attn_fwd takes codes. */
static te_tensor *codes_by(te_ctx *te, te_tensor *x, te_dtype codes, float scale, te_tensor **scale_inv) {
    te_op_fp8_quantize_args cast = {0};
    const int64_t *shape = te_tensor_shape(x), last = shape[te_tensor_ndim(x) - 1];
    te_tensor *y = te_tensor_empty(te, codes, te_tensor_ndim(x), shape);
    cast.x = te_tensor_view(x, SHAPE(te_tensor_numel(x) / last, last));
    cast.row = te_tensor_view(y, SHAPE(te_tensor_numel(x) / last, last));
    cast.scale = te_tensor_full(te, TE_F32, SHAPE(1), (double)scale);
    cast.scale_inv = *scale_inv = te_tensor_empty(te, TE_F32, SHAPE(1));
    te_op_fp8_quantize(te, &cast);
    return y;
}

static outcome points(te_ctx *te, const problem *p, int step, const scales *in) {
    te_op_attn_fwd_args f = {0};
    te_op_attn_bwd_args g = {0};
    outcome out = {0};
    te_tensor *x[TENSORS];
    int64_t shape[4];
    const bool rounds = p->recipe.kind != TE_RECIPE_MXFP8;
    te_scope_begin(te);
    te_no_grad_begin(te);
    for (int i = 0; i < INPUTS; i++) x[i] = input_of(te, p, i == DO ? DO : i, step);
    te_tensor *const plain[3] = {x[Q], x[K], x[V]};
    const float scale = three(te, p, x, false, in->forward[QKV], &out.amax.forward[QKV]);
    for (int i = O; i < TENSORS; i++) x[i] = te_tensor_empty(te, p->dtype, shape_of(p, i, shape), shape);
    f.q = g.q = x[Q];
    f.k = g.k = x[K];
    f.v = g.v = x[V];
    f.o = x[O];
    f.lse = te_tensor_empty(te, TE_F32, SHAPE(B, H, p->s));
    f.format = g.format = p->format;
    if (p->format == TE_THD) {
        f.rule.mask = g.rule.mask = TE_MASK_PADDING_CAUSAL;
        f.rule.cu_seqlens_q = f.rule.cu_seqlens_kv = starts_of(te, p);
        g.rule = f.rule;
    }
    if (rounds) {
        f.fp8.s_dtype = g.fp8.s_dtype = codes_of(p, false);
        g.fp8.dp_dtype = codes_of(p, true);
        g.fp8.s_scale = te_tensor_full(te, TE_F32, SHAPE(1), (double)in->forward[S]); /* in the forward pass each row has a scale of its own */
        f.q = g.q = codes_by(te, plain[Q], codes_of(p, false), scale, &f.fp8.q_scale_inv);
        f.k = g.k = codes_by(te, plain[K], codes_of(p, false), scale, &f.fp8.k_scale_inv);
        f.v = g.v = codes_by(te, plain[V], codes_of(p, false), scale, &f.fp8.v_scale_inv);
        g.fp8.q_scale_inv = f.fp8.q_scale_inv, g.fp8.k_scale_inv = f.fp8.k_scale_inv, g.fp8.v_scale_inv = f.fp8.v_scale_inv;
        g.fp8.dp_scale = te_tensor_full(te, TE_F32, SHAPE(1), (double)in->backward[DP]);
        f.fp8.s_amax = te_tensor_zeros(te, TE_F32, SHAPE(1));
        g.fp8.dp_amax = te_tensor_zeros(te, TE_F32, SHAPE(1));
    }
    te_op_attn_fwd(te, &f);
    g.o = x[O];
    g.lse = f.lse;
    out.x[O] = bytes_of(one(te, p, x[O], false, in->forward[OUT], &out.amax.forward[OUT]));
    te_tensor *const gradient = x[DO];
    g.d_o = one(te, p, x[DO], true, in->backward[DOUT], &out.amax.backward[DOUT]);
    if (rounds) g.d_o = codes_by(te, gradient, codes_of(p, true), p->recipe.kind == TE_RECIPE_DELAYED ? in->backward[DOUT] : 57344.0f / largest_of(gradient), &g.fp8.do_scale_inv);
    g.dq = x[DQ];
    g.dk = x[DK];
    g.dv = x[DV];
    te_op_attn_bwd(te, &g);
    if (rounds) {
        out.amax.forward[S] = test_read(f.fp8.s_amax)[0];
        out.amax.backward[DP] = test_read(g.fp8.dp_amax)[0];
    }
    three(te, p, x + DQ, true, in->backward[DQKV], &out.amax.backward[DQKV]);
    for (int i = DQ; i < TENSORS; i++) out.x[i] = bytes_of(x[i]);
    te_no_grad_end(te);
    te_scope_end(te);
    return out;
}

/* ---- the module ---- */

static te_module *new_core(te_ctx *te, const problem *p, bool checkpoint) {
    te_dot_product_attention_desc d = {0};
    d.attention.num_attention_heads = H;
    d.attention.num_gqa_groups = G;
    d.attention.kv_channels = p->d;
    d.attention.qkv_format = p->format;
    if (p->format == TE_THD) d.attention.attn_mask_type = TE_MASK_PADDING_CAUSAL;
    d.attention.checkpoint_core_attention = checkpoint;
    return te_dot_product_attention_create(te, &d);
}
/* The scales that the next step begins with: 1 before a recipe has made any. */
static scales scales_of(te_module *m) {
    te_tensor *forward = te_module_parameter(m, "fp8_scale_fwd"), *backward = te_module_parameter(m, "fp8_scale_bwd");
    scales s;
    for (int i = 0; i < SLOTS; i++) s.forward[i] = forward ? test_read(forward)[i] : 1;
    for (int i = 0; i < DSLOTS; i++) s.backward[i] = backward ? test_read(backward)[i] : 1;
    return s;
}
static outcome step_of(te_module *m, const problem *p, int step) {
    te_ctx *te = te_module_ctx(m);
    te_forward_args args = {0};
    te_autocast_desc cast = {0};
    outcome out = {0};
    te_tensor *x[INPUTS];
    te_scope_begin(te);
    for (int i = 0; i < INPUTS; i++) x[i] = te_tensor_set_requires_grad(input_of(te, p, i, step), i != DO);
    args.input = x[Q];
    args.key = x[K];
    args.value = x[V];
    if (p->format == TE_THD) args.attention.cu_seqlens_q = starts_of(te, p);
    cast.recipe = &p->recipe;
    te_autocast_begin(te, &cast);
    te_tensor *y = te_forward_with(m, &args);
    te_autocast_end(te);
    CHECK(te_tensor_ndim(y) == (p->format == TE_THD ? 2 : 3) && te_tensor_shape(y)[te_tensor_ndim(y) - 1] == H * p->d);
    te_backward_from(y, te_tensor_view(x[DO], te_tensor_ndim(y), te_tensor_shape(y)));
    CHECK_OK(te);
    out.x[O] = bytes_of(y);
    for (int i = Q; i <= V; i++) out.x[DQ + i] = bytes_of(te_tensor_grad(x[i]));
    te_scope_end(te);
    return out;
}

static void check_same(const outcome *got, const outcome *want) {
    static const char *const names[TENSORS] = {"", "", "", "", "o", "dq", "dk", "dv"};
    for (int i = O; i < TENSORS; i++) CHECK_SAME(names[i], got->x[i], want->x[i]);
}

static problem problem_of(te_recipe recipe, te_dtype dtype, te_qkv_format format) {
    problem p;
    p.recipe = recipe;
    p.recipe.fp8_dpa = true;
    p.recipe.delayed.amax_algo = recipe.kind == TE_RECIPE_DELAYED ? TE_AMAX_MOST_RECENT : TE_AMAX_MAX;
    p.recipe.delayed.amax_history_len = recipe.kind == TE_RECIPE_DELAYED ? 4 : 0;
    p.dtype = dtype;
    p.format = format;
    p.s = recipe.kind == TE_RECIPE_MXFP8 ? 128 : 21;
    p.d = recipe.kind == TE_RECIPE_MXFP8 ? 32 : 24;
    return p;
}

/* One after the other: each step's scales are those that the amaxes of the step before make. */
TE_TEST_DEVICES(fp8_attention_points) {
    te_recipe (*const recipes[])(void) = {te_recipe_delayed_scaling, te_recipe_current_scaling, te_recipe_mxfp8};
    static const te_dtype dtypes[] = {TE_F32, TE_BF16, TE_F16};
    for (int n = 0; n < 11; n++) { /* the last two: packed, which MXFP8 does not take */
        if (test_samples() && n != 0 && n != 5 && n != 7 && n != 10) continue; /* those have each recipe, format and layout */
        problem p = problem_of(recipes[n < 9 ? n / 3 : n - 9](), dtypes[n % 3], n >= 9 ? TE_THD : n % 2 ? TE_BSHD : TE_SBHD);
        te_module *m = new_core(te, &p, false);
        for (int step = 0; step < MOST_STEPS; step++) {
            scales before = scales_of(m);
            outcome want = points(te, &p, step, &before), got = step_of(m, &p, step);
            scales after = scales_of(m);
            test_case("%s %s, format %d, step %d", te_recipe_name(p.recipe.kind), te_dtype_name(p.dtype), (int)p.format, step);
            check_same(&got, &want);
            for (int i = 0; i < SLOTS; i++)
                CHECK_MSG(after.forward[i] == (want.amax.forward[i] > 0 ? 448 / want.amax.forward[i] : 1), "forward slot %d: the scale is %g after an amax of %g", i,
                          (double)after.forward[i], (double)want.amax.forward[i]);
            for (int i = 0; i < DSLOTS; i++)
                CHECK_MSG(after.backward[i] == (want.amax.backward[i] > 0 ? 57344 / want.amax.backward[i] : 1), "backward slot %d: the scale is %g after an amax of %g", i,
                          (double)after.backward[i], (double)want.amax.backward[i]);
        }
        CHECK_EQ_INT(te_module_parameter(m, "fp8_scale_fwd") != NULL, p.recipe.kind != TE_RECIPE_MXFP8);
        te_module_destroy(m);
    }
}

/* The history of a delayed recipe, newest amax last; of S and dP under current scaling it is one row, which the update empties. */
TE_TEST_DEVICES(fp8_attention_histories) {
    for (int current = 0; current < 2; current++) {
        problem p = problem_of(current ? te_recipe_current_scaling() : te_recipe_delayed_scaling(), TE_F32, TE_SBHD);
        te_module *m = new_core(te, &p, false);
        scales before = scales_of(m);
        outcome want = points(te, &p, 0, &before);
        step_of(m, &p, 0);
        te_tensor *history = te_module_parameter(m, "fp8_amax_history_fwd");
        int64_t rows = te_tensor_shape(history)[0];
        CHECK_EQ_INT(rows, current ? 1 : 4);
        for (int64_t row = 0; row < rows; row++)
            for (int i = 0; i < SLOTS; i++) {
                float x = test_read(history)[row * SLOTS + i];
                CHECK_MSG(x == (row > 0 && row == rows - 1 ? want.amax.forward[i] : 0), "row %d, slot %d: %g", (int)row, i, (double)x);
            }
        te_module_destroy(m);
    }
}

TE_TEST_DEVICES(fp8_attention_runs_again) {
    for (int current = 0; current < 2; current++) {
        problem p = problem_of(current ? te_recipe_current_scaling() : te_recipe_delayed_scaling(), TE_BF16, TE_BSHD);
        te_module *plain = new_core(te, &p, false), *again = new_core(te, &p, true);
        for (int step = 0; step < MOST_STEPS; step++) {
            outcome want = step_of(plain, &p, step), got = step_of(again, &p, step);
            scales a = scales_of(plain), b = scales_of(again);
            test_case("%s, step %d", te_recipe_name(p.recipe.kind), step);
            check_same(&got, &want);
            CHECK_BYTES("scales", &b, &a, sizeof a);
        }
        te_module_destroy(plain);
        te_module_destroy(again);
    }
}

/* FP8's own error, in the mean: codes of 4 bits are off by up to a sixteenth, and scores add up those of q and k. The third step: its scales fit. */
TE_TEST_DEVICES(fp8_attention_is_near_attention) {
    te_recipe (*const recipes[])(void) = {te_recipe_delayed_scaling, te_recipe_current_scaling, te_recipe_mxfp8};
    for (int n = 0; n < COUNT(recipes); n++) {
        problem p = problem_of(recipes[n](), TE_F32, TE_SBHD), plain = p;
        te_module *m = new_core(te, &p, false);
        plain.recipe.fp8_dpa = false;
        test_case("%s", te_recipe_name(p.recipe.kind));
        step_of(m, &p, 0);
        step_of(m, &p, 0);
        outcome got = step_of(m, &p, 0), want = step_of(m, &plain, 0);
        CHECK_ERROR_BELOW("o", (const float *)(const void *)got.x[O].data, (const float *)(const void *)want.x[O].data, (int64_t)want.x[O].n / 4, 0.0675);
        CHECK(memcmp(got.x[O].data, want.x[O].data, want.x[O].n) != 0);
        te_module_destroy(m);
    }
}

/* MultiheadAttention's projection multiplies the very codes of the core: it quantizes no input of its own. */
TE_TEST_DEVICES(fp8_attention_hands_codes_on) {
    for (int turn = 0; turn < 6; turn += test_every_sanitized(1)) {
        const int n = turn % 3;
        const bool again = turn >= 3; /* the core runs again in the backward pass */
        te_recipe recipe = n == 0 ? te_recipe_delayed_scaling() : n == 1 ? te_recipe_current_scaling() : te_recipe_mxfp8();
        te_multihead_attention_desc d = {0};
        te_autocast_desc cast = {0};
        te_forward_args core = {0};
        const int64_t s = 128, d_head = 32, width = H * d_head, shape[4] = {s, B, H, d_head};
        te_tensor *part[3];
        recipe.fp8_mha = true;
        cast.recipe = &recipe;
        d.hidden_size = width;
        d.attention.num_attention_heads = H;
        d.attention.checkpoint_core_attention = again;
        d.attention.no_qkv_weight_interleaved = true;
        test_case("%s%s", te_recipe_name(recipe.kind), again ? ", checkpoint" : "");
        te_scope_begin(te);
        te_module *m = te_multihead_attention_create(te, &d);
        te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(s, B, width), test_normal(s * B * width, 3)), true);
        te_autocast_begin(te, &cast);
        te_tensor *y = te_forward(m, x);
        te_tensor *qkv = te_forward(te_module_find(m, "qkv"), x);
        for (int i = 0; i < 3; i++) part[i] = te_tensor_view(te_tensor_contiguous(te_tensor_narrow(qkv, 2, i * width, width)), 4, shape);
        core.input = part[0];
        core.key = part[1];
        core.value = part[2];
        core.fp8_output = true;
        te_dot_product_attention_desc c = {.attention.num_attention_heads = H, .attention.kv_channels = d_head};
        te_module *alone = te_dot_product_attention_create(te, &c);
        te_tensor *o = te_forward_with(te_module_find(m, "core_attention"), &core);
        CHECK_SAME("codes of a core of its own", bytes_of(te_dequantize(te_forward_with(alone, &core), TE_DTYPE_NONE)), bytes_of(te_dequantize(o, TE_DTYPE_NONE)));
        CHECK_EQ_INT(te_quantized_kind(o), n == 0 ? TE_QUANT_DELAYED : n == 1 ? TE_QUANT_CURRENT : TE_QUANT_MXFP8);
        te_tensor *want = te_forward(te_module_find(m, "proj"), n == 2 ? te_dequantize(o, TE_DTYPE_NONE) : o);
        te_autocast_end(te);
        CHECK_SAME("the output", bytes_of(y), bytes_of(want));
        if (n == 0) {
            te_tensor *history = te_module_parameter(te_module_find(m, "proj"), "fp8_amax_history_fwd");
            int64_t last = te_tensor_shape(history)[0] - 1;
            CHECK(test_read(history)[last * 3] == 0 && test_read(history)[last * 3 + 1] > 0);
        }
        te_backward(te_mean_all(y));
        CHECK_OK(te);
        CHECK(te_tensor_grad(x) && te_tensor_grad(te_module_parameter(te_module_find(m, "proj"), "weight")));
        te_module_destroy(alone);
        te_module_destroy(m);
        te_scope_end(te);
    }
}

/* A factory that answers what a recipe would; `odd`: the one slot of the core that gets `instead`, or -1. */
typedef struct factory {
    te_recipe_kind like;
    int odd;
    te_quantizer_desc instead;
} factory;
static te_result answers(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) {
    const factory *f = (const factory *)user;
    const bool core = strcmp(role->module_type, "DotProductAttention") == 0, backward = role->tensor_type >= TE_TENSOR_GRAD_OUTPUT;
    if (!core && (role->tensor_type == TE_TENSOR_OUTPUT || role->tensor_type == TE_TENSOR_GRAD_INPUT)) return TE_OK;
    desc->kind = f->like == TE_RECIPE_MXFP8 ? TE_QUANT_MXFP8 : f->like == TE_RECIPE_DELAYED || (core && role->gemm == 2) ? TE_QUANT_DELAYED : TE_QUANT_CURRENT;
    if (desc->kind != TE_QUANT_DELAYED) desc->dtype = backward && desc->kind == TE_QUANT_CURRENT ? TE_F8E5M2 : TE_F8E4M3;
    if (core && role->gemm * 5 + (int)role->tensor_type == f->odd) *desc = f->instead;
    return TE_OK;
}
/* Of S and dP current scaling has the latest amax alone. */
static te_recipe factory_recipe(factory *f, const te_recipe *like) {
    te_recipe r = te_recipe_custom(answers, f);
    r.fp8_dpa = like->fp8_dpa, r.fp8_mha = like->fp8_mha;
    r.delayed.amax_history_len = like->kind == TE_RECIPE_DELAYED ? like->delayed.amax_history_len : 1;
    r.delayed.amax_algo = like->kind == TE_RECIPE_DELAYED ? like->delayed.amax_algo : TE_AMAX_MOST_RECENT;
    return r;
}

/* A custom recipe whose factory answers as another recipe has that one's bytes: of the core, with and without a second run; of MultiheadAttention, whose projection gets codes where that one's does. */
TE_TEST_DEVICES(fp8_attention_of_a_factory) {
    te_recipe (*const recipes[])(void) = {te_recipe_delayed_scaling, te_recipe_current_scaling, te_recipe_mxfp8};
    for (int n = 0; n < 12; n += test_every_odd(2)) {
        problem p = problem_of(recipes[n % 3](), n % 2 ? TE_BF16 : TE_F32, n < 6 || n % 3 == 2 ? TE_SBHD : TE_THD), own = p;
        factory f = {p.recipe.kind, -1, {0}};
        own.recipe = factory_recipe(&f, &p.recipe);
        te_module *theirs = new_core(te, &p, n >= 6), *ours = new_core(te, &own, n >= 6);
        for (int step = 0; step < MOST_STEPS; step++) {
            test_case("%s %s, format %d, step %d", te_recipe_name(p.recipe.kind), te_dtype_name(p.dtype), (int)p.format, step);
            outcome want = step_of(theirs, &p, step), got = step_of(ours, &own, step);
            scales a = scales_of(theirs), b = scales_of(ours);
            check_same(&got, &want);
            if (p.recipe.kind != TE_RECIPE_MXFP8) CHECK_BYTES("scales", &b, &a, sizeof a);
        }
        te_module_destroy(theirs);
        te_module_destroy(ours);
    }
    for (int n = 0; n < 3; n++) {
        enum { SEQ = 128, HEAD = 32, WIDE = H * HEAD };
        te_recipe like = recipes[n]();
        like.fp8_mha = true;
        like.delayed.amax_history_len = n ? 0 : 4;
        factory f = {like.kind, -1, {0}};
        test_bytes y[2], dx[2], dw[2];
        te_scope_begin(te);
        for (int custom = 0; custom < 2; custom++) {
            const te_recipe r = custom ? factory_recipe(&f, &like) : like;
            te_autocast_desc cast = {.recipe = &r};
            te_rng_set(te, 5, 0);
            te_module *m = te_multihead_attention_create(te, &(te_multihead_attention_desc){.hidden_size = WIDE, .attention.num_attention_heads = H});
            test_case("%s, %d", te_recipe_name(like.kind), custom);
            for (int step = n && test_samples() ? 1 : 0; step < 2; step++) { /* with a sanitizer two steps only where scales are delayed */
                te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(SEQ, B, WIDE), test_normal(SEQ * B * WIDE, 3)), true);
                te_module_zero_grad(m);
                te_autocast_begin(te, &cast);
                te_tensor *out = te_forward(m, x);
                te_autocast_end(te);
                te_backward_from(out, test_tensor(te, TE_BF16, SHAPE(SEQ, B, WIDE), test_normal(SEQ * B * WIDE, 4)));
                REQUIRE_OK(te);
                y[custom] = bytes_of(out), dx[custom] = bytes_of(te_tensor_grad(x)), dw[custom] = bytes_of(te_tensor_grad(te_module_parameter(te_module_find(m, "proj"), "weight")));
            }
            te_module_destroy(m);
        }
        CHECK_SAME("y", y[1], y[0]);
        CHECK_SAME("dx", dx[1], dx[0]);
        CHECK_SAME("dw of the projection", dw[1], dw[0]);
        te_scope_end(te);
    }
}

TE_TEST(fp8_attention_refuses_a_factory) {
    static const te_quantizer_desc block = {.kind = TE_QUANT_BLOCK, .dtype = TE_F8E4M3}, mxfp8 = {.kind = TE_QUANT_MXFP8, .dtype = TE_F8E4M3}, current = {.kind = TE_QUANT_CURRENT, .dtype = TE_F8E4M3}, none = {0};
    static const struct {
        te_recipe_kind like;
        int odd;
        const te_quantizer_desc *instead;
        const char *who;
    } cases[] = {{TE_RECIPE_DELAYED, 2, &block, "gives q, k and v the kind block"}, {TE_RECIPE_CURRENT, 5, &mxfp8, "gives o the kind MXFP8"}, {TE_RECIPE_CURRENT, 12, &current, "gives the softmax the kind current"},
                 {TE_RECIPE_MXFP8, 3, &current, "gives the gradients of q, k and v the kind current"}, {TE_RECIPE_MXFP8, 9, &none, "gives the gradient of o the kind"},
                 {TE_RECIPE_DELAYED, 14, &none, "gives the gradient of the softmax the kind"}};
    te_ctx *te = test_context("cpu");
    for (int i = 0; i < COUNT(cases); i++) {
        problem p = problem_of(cases[i].like == TE_RECIPE_MXFP8 ? te_recipe_mxfp8() : te_recipe_current_scaling(), TE_F32, TE_SBHD);
        factory f = {cases[i].like, cases[i].odd, *cases[i].instead};
        p.recipe = factory_recipe(&f, &p.recipe);
        te_module *m = new_core(te, &p, false);
        te_forward_args args = {.input = input_of(te, &p, Q, 0), .key = input_of(te, &p, K, 0), .value = input_of(te, &p, V, 0)};
        test_case("%s", cases[i].who);
        te_autocast_begin(te, &(te_autocast_desc){.recipe = &p.recipe});
        CHECK(!te_forward_with(m, &args));
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, cases[i].who);
        te_autocast_end(te);
        te_module_destroy(m);
    }
}

/* Another recipe for the core alone; and none. */
TE_TEST(fp8_attention_by_module) {
    te_ctx *te = test_context("cpu");
    problem p = problem_of(te_recipe_current_scaling(), TE_F32, TE_SBHD), outer = p, plain = p;
    te_module *a = new_core(te, &p, false), *b = new_core(te, &p, false);
    outer.recipe = te_recipe_nvfp4();
    plain.recipe = te_recipe_nvfp4();
    te_module_set_recipe(a, &p.recipe, false);
    outcome want = step_of(b, &p, 0), got = step_of(a, &outer, 0);
    check_same(&got, &want);
    te_module_set_recipe(b, NULL, true);
    outcome off = step_of(b, &p, 0), high = step_of(b, &plain, 0);
    check_same(&off, &high);
    te_module_destroy(a);
    te_module_destroy(b);
}

TE_TEST(fp8_attention_refuses) {
    te_ctx *te = test_context("cpu");
    te_forward_args args = {0};
    te_autocast_desc cast = {0};
    problem p = problem_of(te_recipe_mxfp8(), TE_F32, TE_SBHD);
    p.s = 96;
    cast.recipe = &p.recipe;
    te_module *m = new_core(te, &p, false);
    args.input = input_of(te, &p, Q, 0);
    args.key = input_of(te, &p, K, 0);
    args.value = input_of(te, &p, V, 0);
    te_autocast_begin(te, &cast);
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_SHAPE, "q is [96, 2, 4, 32], k [96, 2, 2, 32], v [96, 2, 2, 32], with fp8_dpa of recipe mxfp8: sequences that are multiples of 128");
    te_autocast_end(te);
    te_module_destroy(m);
}
