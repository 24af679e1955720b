/* The options of DotProductAttention, each against te_attention, which test_attn_extras.c holds against formulas: bytes of outputs and gradients, since both run the very same operations;
 * checkpoints, finite differences, ranks, refusals. The modules around it: test_attention_layers.c. */
#include "attention.h"

/* ---- a case, as a call of the module and as one of te_attention ---- */

typedef enum lengths { NO_LENGTHS, BY_CU, BY_MASK, BY_TWO_MASKS } lengths;
typedef enum packing { APART, QKV, QKV_HEADS, KV, KV_HEADS } packing;
typedef struct acase {
    const char *name;
    te_qkv_format format;
    te_attn_mask mask;
    lengths given;
    packing packed;
    te_window window;
    te_switch bottom_right;
    te_attn_bias bias;
    bool slopes;     /* with TE_ATTN_BIAS_ALIBI */
    te_softmax_type softmax;
    bool padded;     /* packed sequences have rows between them */
    bool cross;
    float dropout;
    bool max_logit;
} acase;

static const acase cases[] = {
    {.name = "plain", .mask = TE_MASK_CAUSAL},
    {.name = "everything, bshd", .format = TE_BSHD, .mask = TE_MASK_NONE, .max_logit = true},
    {.name = "bottom right", .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT, .cross = true, .max_logit = true},
    {.name = "window", .mask = TE_MASK_CAUSAL, .window = {true, 2, 0}},
    {.name = "window on both sides", .mask = TE_MASK_NONE, .window = {true, 2, 3}, .cross = true},
    {.name = "window from the top left", .mask = TE_MASK_NONE, .window = {true, 2, 3}, .bottom_right = TE_OFF, .cross = true},
    {.name = "padding by starts", .mask = TE_MASK_PADDING, .given = BY_CU, .cross = true},
    {.name = "padding by a mask", .mask = TE_MASK_PADDING, .given = BY_MASK},
    {.name = "padding by a mask, bshd", .format = TE_BSHD, .mask = TE_MASK_PADDING_CAUSAL, .given = BY_MASK, .dropout = 0.3f},
    {.name = "padding by two masks", .mask = TE_MASK_PADDING, .given = BY_TWO_MASKS, .cross = true, .max_logit = true},
    {.name = "padding by two masks, bottom right, bshd", .format = TE_BSHD, .mask = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT, .given = BY_TWO_MASKS, .cross = true, .window = {true, 3, 0}},
    {.name = "packed sequences", .format = TE_THD, .mask = TE_MASK_PADDING_CAUSAL, .given = BY_CU},
    {.name = "packed sequences with padding", .format = TE_THD, .mask = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT, .given = BY_CU, .padded = true, .cross = true, .dropout = 0.2f, .max_logit = true},
    {.name = "packed sequences, packed tensor", .format = TE_THD, .mask = TE_MASK_PADDING, .given = BY_CU, .packed = QKV},
    {.name = "arbitrary", .mask = TE_MASK_ARBITRARY, .cross = true},
    {.name = "arbitrary, window, bshd", .format = TE_BSHD, .mask = TE_MASK_ARBITRARY, .window = {true, 2, 2}, .bottom_right = TE_OFF},
    {.name = "pre-scale bias", .mask = TE_MASK_CAUSAL, .bias = TE_ATTN_BIAS_PRE_SCALE},
    {.name = "post-scale bias", .format = TE_BSHD, .mask = TE_MASK_NONE, .bias = TE_ATTN_BIAS_POST_SCALE, .cross = true, .dropout = 0.25f},
    {.name = "alibi", .mask = TE_MASK_CAUSAL, .bias = TE_ATTN_BIAS_ALIBI},
    {.name = "alibi with slopes", .mask = TE_MASK_NONE, .bias = TE_ATTN_BIAS_ALIBI, .slopes = true, .cross = true},
    {.name = "alibi from the top left", .mask = TE_MASK_NONE, .bias = TE_ATTN_BIAS_ALIBI, .bottom_right = TE_OFF, .cross = true},
    {.name = "off by one", .mask = TE_MASK_CAUSAL, .softmax = TE_SOFTMAX_OFF_BY_ONE},
    {.name = "learnable", .format = TE_BSHD, .mask = TE_MASK_CAUSAL, .softmax = TE_SOFTMAX_LEARNABLE, .max_logit = true},
    {.name = "learnable, padded, biased", .mask = TE_MASK_PADDING_CAUSAL, .given = BY_MASK, .softmax = TE_SOFTMAX_LEARNABLE, .bias = TE_ATTN_BIAS_POST_SCALE, .dropout = 0.1f},
    {.name = "packed [3, H, d]", .mask = TE_MASK_CAUSAL, .packed = QKV},
    {.name = "packed [H, 3, d]", .format = TE_BSHD, .mask = TE_MASK_NONE, .packed = QKV_HEADS},
    {.name = "packed [2, G, d]", .mask = TE_MASK_NONE, .packed = KV, .cross = true},
    {.name = "packed [G, 2, d]", .format = TE_BSHD, .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT, .packed = KV_HEADS, .cross = true},
};

static const int64_t *lengths_of(const acase *c, bool keys) { return keys && c->cross ? kv_lengths : q_lengths; }
static int64_t longest(const acase *c, bool keys) { return keys && c->cross ? S_KV : S; }
/* Queries, or keys or values of `heads` heads; parts > 1: as many packed into one tensor, at dimension -3 or behind the heads. */
static te_tensor *part(te_ctx *te, const acase *c, te_dtype dtype, bool keys, int heads, int d, int parts, bool behind, uint64_t seed) {
    const int64_t s = longest(c, keys), *length = lengths_of(c, keys), tokens = length[0] + length[1] + (c->padded ? 4 : 0);
    int64_t shape[5];
    int n = 0;
    if (c->format == TE_THD) shape[n++] = tokens;
    else shape[n++] = c->format == TE_BSHD ? B : s, shape[n++] = c->format == TE_BSHD ? s : B;
    if (parts > 1 && !behind) shape[n++] = parts;
    shape[n++] = heads;
    if (parts > 1 && behind) shape[n++] = parts;
    shape[n++] = d;
    return leaf(te, dtype, n, shape, seed);
}

typedef struct inputs {
    te_tensor *leaf[5]; /* q, k, v or packed ones, bias, or NULL */
    te_forward_args args;
    te_attn_desc hand;
} inputs;
static inputs make_inputs(te_ctx *te, const acase *c, te_dtype dtype) {
    inputs in;
    const bool all = c->packed == QKV || c->packed == QKV_HEADS, keys = c->packed == KV || c->packed == KV_HEADS;
    const int groups = all ? H : G, d_v = c->packed ? D : DV;
    te_attn_call *a = &in.args.attention;
    te_attn_rule *x = &in.hand.rule;
    memset(&in, 0, sizeof in);
    if (all) in.leaf[0] = a->qkv_layer = part(te, c, dtype, false, H, D, 3, c->packed == QKV_HEADS, 1);
    else in.leaf[0] = in.args.input = part(te, c, dtype, false, H, D, 1, false, 1);
    if (keys) in.leaf[1] = a->kv_layer = part(te, c, dtype, true, G, D, 2, c->packed == KV_HEADS, 2);
    if (!c->packed) {
        in.leaf[1] = in.args.key = part(te, c, dtype, true, groups, D, 1, false, 2);
        in.leaf[2] = in.args.value = part(te, c, dtype, true, groups, d_v, 1, false, 3);
    }
    if (c->packed == QKV_HEADS || c->packed == KV_HEADS) a->qkv_interleave_dim = -2;
    if (c->given == BY_CU) {
        a->cu_seqlens_q = starts(te, q_lengths, 0);
        if (c->cross) a->cu_seqlens_kv = starts(te, kv_lengths, 0);
        if (c->padded) a->cu_seqlens_q_padded = starts(te, q_lengths, 2), a->cu_seqlens_kv_padded = starts(te, lengths_of(c, true), 2), a->pad_between_seqs = TE_ON;
        if (c->format == TE_THD) a->max_seqlen_q = S, a->max_seqlen_kv = longest(c, true);
    }
    if (c->given >= BY_MASK) a->attention_mask = padding(te, lengths_of(c, true), longest(c, true));
    if (c->given == BY_TWO_MASKS) a->attention_mask_q = padding(te, q_lengths, S);
    if (c->mask == TE_MASK_ARBITRARY) {
        uint8_t hidden[H * S_KV];
        for (int i = 0; i < H * S_KV; i++) hidden[i] = i % 4 == 1;
        a->attention_mask = te_tensor_from_host(te, TE_U8, SHAPE(1, H, 1, longest(c, true)), hidden);
    }
    a->core_attention_bias_type = c->bias;
    if (c->bias == TE_ATTN_BIAS_PRE_SCALE || c->bias == TE_ATTN_BIAS_POST_SCALE) in.leaf[3] = a->core_attention_bias = leaf(te, dtype, SHAPE(1, H, S, longest(c, true)), 4);
    if (c->slopes) a->alibi_slopes = te_tensor_full(te, TE_F32, SHAPE(H), 0.2);
    in.hand.format = c->format;
    in.hand.rule.mask = c->mask;
    in.hand.rule.window = c->window;
    in.hand.rule.dropout_p = c->dropout;
    if (c->given) {
        x->cu_seqlens_q = starts(te, q_lengths, 0);
        x->cu_seqlens_kv = starts(te, lengths_of(c, true), 0);
    }
    x->bottom_right_diagonal = c->bottom_right;
    x->cu_seqlens_q_padded = a->cu_seqlens_q_padded;
    x->cu_seqlens_kv_padded = a->cu_seqlens_kv_padded;
    x->max_seqlen_q = a->max_seqlen_q;
    x->max_seqlen_kv = a->max_seqlen_kv;
    if (c->mask == TE_MASK_ARBITRARY) x->attention_mask = a->attention_mask;
    x->core_attention_bias_type = c->bias;
    x->core_attention_bias = a->core_attention_bias;
    x->alibi_slopes = a->alibi_slopes;
    x->softmax_type = c->softmax;
    return in;
}
/* Part i of n of a packed tensor, copied. */
static te_tensor *unpacked(te_tensor *x, bool behind, int n, int i) {
    const int dim = te_tensor_ndim(x) - (behind ? 2 : 3);
    int64_t shape[5];
    int k = 0;
    (void)n;
    for (int j = 0; j < te_tensor_ndim(x); j++)
        if (j != dim) shape[k++] = te_tensor_shape(x)[j];
    return te_tensor_view(te_tensor_contiguous(te_tensor_narrow(x, dim, i, 1)), k, shape);
}
static te_tensor *by_hand(const acase *c, const inputs *in) {
    const bool behind = c->packed == QKV_HEADS || c->packed == KV_HEADS;
    te_tensor *p[3] = {in->leaf[0], in->leaf[1], in->leaf[2]};
    for (int i = 0; i < 3; i++) {
        if (c->packed == QKV || c->packed == QKV_HEADS) p[i] = unpacked(in->leaf[0], behind, 3, i);
        if ((c->packed == KV || c->packed == KV_HEADS) && i) p[i] = unpacked(in->leaf[1], behind, 2, i - 1);
    }
    return te_attention(p[0], p[1], p[2], &in->hand);
}

typedef enum way { BY_DESC, BY_CALL, BY_CHECKPOINT, WAYS } way;
static te_module *make_core(te_ctx *te, const acase *c, way w, te_forward_args *args) {
    te_dot_product_attention_desc d = {.attention.num_attention_heads = H, .attention.num_gqa_groups = c->packed == QKV || c->packed == QKV_HEADS ? H : G, .attention.kv_channels = D};
    d.attention.qkv_format = c->format;
    d.attention.attention_dropout = c->dropout;
    d.attention.softmax_type = c->softmax;
    d.attention.return_max_logit = c->max_logit;
    d.attention.attention_type = c->cross ? TE_ATTENTION_CROSS : TE_ATTENTION_SELF;
    if (w == BY_CALL) {
        d.attention.attn_mask_type = c->mask == TE_MASK_NONE ? TE_MASK_CAUSAL : TE_MASK_NONE;
        d.attention.window = (te_window){true, 0, 0};
        d.attention.bottom_right_diagonal = c->bottom_right == TE_OFF ? TE_ON : TE_OFF;
        args->attention.attn_mask_type = c->mask;
        args->attention.window = c->window.on ? c->window : (te_window){true, -1, -1};
        args->attention.bottom_right_diagonal = c->bottom_right ? c->bottom_right : TE_ON;
    } else {
        d.attention.attn_mask_type = c->mask;
        d.attention.window = c->window;
        d.attention.bottom_right_diagonal = c->bottom_right;
        d.attention.checkpoint_core_attention = w == BY_CHECKPOINT;
    }
    return te_dot_product_attention_create(te, &d);
}

/* Every case in bf16 and f32, its options in the desc, in the call, and in a core that runs again. */
TE_TEST_DEVICES(attention_options_of_the_core) {
    for (int n = 0; n < COUNT(cases) * 2 * WAYS; n++) {
        const acase *c = &cases[n / 2 / WAYS];
        const way w = (way)(n % WAYS);
        const te_dtype dtype = n / WAYS % 2 ? TE_F32 : TE_BF16;
        static const char *const names[] = {"dq", "dk", "dv", "dbias", "dsoftmax_offset"};
        test_case("%s, %s, %s", c->name, te_dtype_name(dtype), w == BY_DESC ? "by the desc" : w == BY_CALL ? "by the call" : "checkpointed");
        te_scope_begin(te);
        inputs in = make_inputs(te, c, dtype);
        te_module *m = make_core(te, c, w, &in.args);
        REQUIRE_OK(te);
        if (c->softmax == TE_SOFTMAX_LEARNABLE) {
            in.leaf[4] = in.hand.rule.softmax_offset = te_module_parameter(m, "softmax_offset");
            REQUIRE(in.leaf[4] && te_tensor_dtype(in.leaf[4]) == TE_F32 && te_tensor_numel(in.leaf[4]) == H && te_tensor_requires_grad(in.leaf[4]));
            CHECK(test_read(in.leaf[4])[0] == 0);
            te_tensor_copy_from_host(in.leaf[4], test_normal(H, 9));
        } else
            CHECK(te_module_num_parameters(m) == 0);
        if (c->max_logit) in.hand.max_logit = te_tensor_empty(te, TE_F32, SHAPE(H));
        float *grads[2][5] = {{NULL}};
        te_tensor *out[2], *logit = NULL;
        for (int run = 0; run < 2; run++) {
            te_seed(te, 11);
            for (int i = 0; i < 5; i++)
                if (in.leaf[i]) te_tensor_zero_grad(in.leaf[i]);
            out[run] = run ? by_hand(c, &in) : te_forward_with(m, &in.args);
            if (!run) logit = in.args.outputs.max_logit;
            REQUIRE_OK(te);
            te_backward_from(out[run], test_tensor(te, dtype, te_tensor_ndim(out[run]), te_tensor_shape(out[run]), test_normal(te_tensor_numel(out[run]), 5)));
            REQUIRE_OK(te);
            for (int i = 0; i < 5; i++)
                if (in.leaf[i]) grads[run][i] = test_read(te_tensor_grad(in.leaf[i]));
        }
        CHECK_EQ_INT(te_tensor_ndim(out[0]), c->format == TE_THD ? 2 : 3);
        CHECK_EQ_INT(te_tensor_numel(out[0]), te_tensor_numel(out[1]));
        CHECK_BYTES("out", test_read(out[0]), test_read(out[1]), (size_t)te_tensor_numel(out[1]) * sizeof(float));
        for (int i = 0; i < 5; i++)
            if (in.leaf[i]) CHECK_BYTES(names[i], grads[0][i], grads[1][i], (size_t)te_tensor_numel(in.leaf[i]) * sizeof(float));
        CHECK((logit != NULL) == c->max_logit);
        if (logit) CHECK_BYTES("max_logit", test_read(logit), test_read(in.hand.max_logit), H * sizeof(float));
        te_module_destroy(m);
        te_scope_end(te);
    }
}

/* TransformerEngine's rules of windows: causal masks take the right bound away, and (-1, 0) is none under the others. */
TE_TEST(attention_options_windows) {
    te_ctx *te = test_context("cpu");
    static const struct {
        te_attn_mask mask;
        te_window given, means;
    } rules[] = {{TE_MASK_CAUSAL, {true, 2, 5}, {true, 2, 0}},
                 {TE_MASK_CAUSAL, {true, -1, -1}, {true, -1, 0}},
                 {TE_MASK_CAUSAL, {true, 2, -1}, {true, 2, 0}},
                 {TE_MASK_NONE, {true, -1, 0}, {false, 0, 0}},
                 {TE_MASK_NONE, {true, -1, -1}, {false, 0, 0}}};
    te_tensor *x = leaf(te, TE_F32, SHAPE(S, B, H, D), 1);
    for (int i = 0; i < COUNT(rules); i++) {
        te_dot_product_attention_desc d = {.attention.num_attention_heads = H, .attention.kv_channels = D, .attention.attn_mask_type = rules[i].mask, .attention.window = rules[i].given};
        te_module *m = te_dot_product_attention_create(te, &d);
        te_forward_args args = {.input = x, .key = x, .value = x};
        test_case("rule %d", i);
        float *got = test_read(te_forward_with(m, &args)), *want = test_read(te_attention(x, x, x, &(te_attn_desc){.rule.mask = rules[i].mask, .rule.window = rules[i].means}));
        REQUIRE_OK(te);
        CHECK_BYTES("out", got, want, S * B * H * D * sizeof(float));
        te_module_destroy(m);
    }
}

/* Without padding between sequences, as the caller says, its starts are not read. */
TE_TEST_DEVICES(attention_options_without_pad_between_seqs) {
    te_dot_product_attention_desc d = {.attention.num_attention_heads = H, .attention.kv_channels = D, .attention.qkv_format = TE_THD, .attention.attn_mask_type = TE_MASK_PADDING};
    te_module *m = te_dot_product_attention_create(te, &d);
    te_tensor *x = leaf(te, TE_F32, SHAPE(14, H, D), 1);
    te_forward_args args = {.input = x, .key = x, .value = x, .attention.cu_seqlens_q = starts(te, q_lengths, 0), .attention.cu_seqlens_q_padded = starts(te, q_lengths, 2)};
    te_attn_desc want = {.format = TE_THD, .rule.mask = TE_MASK_PADDING, .rule.cu_seqlens_q = args.attention.cu_seqlens_q, .rule.cu_seqlens_kv = args.attention.cu_seqlens_q};
    for (int i = 0; i < 2; i++) { /* not, and by default, which is yes */
        args.attention.pad_between_seqs = i ? TE_DEFAULT : TE_OFF;
        if (i) want.rule.cu_seqlens_q_padded = want.rule.cu_seqlens_kv_padded = args.attention.cu_seqlens_q_padded;
        float *got = test_read(te_forward_with(m, &args)), *hand = test_read(te_attention(x, x, x, &want));
        REQUIRE_OK(te);
        CHECK_BYTES("out", got, hand, 14 * H * D * sizeof(float));
    }
    te_module_destroy(m);
}

/* ---- finite differences ---- */

static te_tensor *of_core(te_ctx *te, te_tensor *const *in, void *user) {
    te_forward_args args = {.input = in[0], .key = in[1], .value = in[2], .attention.core_attention_bias_type = TE_ATTN_BIAS_PRE_SCALE, .attention.core_attention_bias = in[3]};
    return (void)te, te_forward_with((te_module *)user, &args);
}
static te_tensor *of_packed_core(te_ctx *te, te_tensor *const *in, void *user) {
    te_forward_args args = {.attention.qkv_layer = in[0]};
    return (void)te, te_forward_with((te_module *)user, &args);
}
static te_tensor *of_packed_keys(te_ctx *te, te_tensor *const *in, void *user) {
    te_forward_args args = {.input = in[0], .attention.kv_layer = in[1], .attention.qkv_interleave_dim = -2};
    return (void)te, te_forward_with((te_module *)user, &args);
}
TE_TEST_DEVICES(attention_options_finite_differences) {
    te_dot_product_attention_desc d = {.attention.num_attention_heads = H, .attention.num_gqa_groups = G, .attention.kv_channels = D, .attention.softmax_type = TE_SOFTMAX_LEARNABLE};
    te_module *m = te_dot_product_attention_create(te, &d);
    te_tensor *offset = te_module_parameter(m, "softmax_offset");
    te_tensor *in[] = {leaf(te, TE_F32, SHAPE(S, B, H, D), 1), leaf(te, TE_F32, SHAPE(S, B, G, D), 2), leaf(te, TE_F32, SHAPE(S, B, G, DV), 3), leaf(te, TE_F32, SHAPE(B, 1, S, S), 4), offset};
    test_case("a bias for each sequence, a learnable offset");
    test_check_gradients(te, of_core, 5, in, m, 1e-2, 1e-3);
    te_module_destroy(m);
    d.attention.num_gqa_groups = H, d.attention.softmax_type = TE_SOFTMAX_VANILLA;
    m = te_dot_product_attention_create(te, &d);
    te_tensor *packed = leaf(te, TE_F32, SHAPE(S, B, 3, H, D), 1), *two[] = {in[0], leaf(te, TE_F32, SHAPE(S, B, H, 2, D), 6)};
    test_case("packed tensors");
    test_check_gradients(te, of_packed_core, 1, &packed, m, 1e-2, 1e-3);
    test_check_gradients(te, of_packed_keys, 2, two, m, 1e-2, 1e-3);
    te_module_destroy(m);
}

/* ---- ranks ---- */

typedef struct shared_case {
    te_attn_bias bias;
    te_softmax_type softmax;
    te_attn_mask mask;
} shared_case;
static const shared_case shared_cases[] = {{TE_ATTN_BIAS_ALIBI, TE_SOFTMAX_LEARNABLE, TE_MASK_CAUSAL}, {TE_ATTN_BIAS_POST_SCALE, TE_SOFTMAX_OFF_BY_ONE, TE_MASK_PADDING}};
/* This rank's heads of an attention, against the same heads of the whole. */
static void shared_heads(rank_state *s) {
    te_ctx *te = s->te;
    for (int n = 0; n < COUNT(shared_cases); n++) {
        const shared_case *c = &shared_cases[n];
        const int64_t own = H / s->size, first = s->rank * own;
        float *out[2], *offset[2];
        for (int run = 0; run < 2; run++) { /* the whole, and this rank's */
            te_dot_product_attention_desc d = {.attention.num_attention_heads = H, .attention.kv_channels = D, .attention.softmax_type = c->softmax, .attention.attn_mask_type = c->mask,
                                               .attention.return_max_logit = true};
            if (run) d.parallel.tp_group = s->group;
            te_module *m = te_dot_product_attention_create(te, &d);
            float values[3][S * B * H * D], logit[H];
            te_tensor *x[3], *bias = te_tensor_empty(te, TE_F32, SHAPE(1, H, S, S));
            for (int i = 0; i < 3; i++) {
                for (int k = 0; k < S * B * H * D; k++) values[i][k] = (float)((k * 37 + i * 11) % 64 - 32) / 32;
                x[i] = te_tensor_from_host(te, TE_F32, SHAPE(S, B, H, D), values[i]);
                if (run) x[i] = te_tensor_contiguous(te_tensor_narrow(x[i], 2, first, own));
            }
            te_tensor_set_requires_grad(x[0], true);
            te_tensor_copy_from_host(bias, values[0]);
            if (run) bias = te_tensor_contiguous(te_tensor_narrow(bias, 1, first, own));
            te_forward_args args = {.input = x[0], .key = x[1], .value = x[2], .attention.core_attention_bias_type = c->bias};
            if (c->bias == TE_ATTN_BIAS_POST_SCALE) args.attention.core_attention_bias = bias;
            if (c->mask == TE_MASK_PADDING) {
                const int32_t at[3] = {0, 4, 10};
                args.attention.cu_seqlens_q = te_tensor_from_host(te, TE_I32, SHAPE(3), at);
            }
            te_tensor *y = te_forward_with(m, &args), *sink = te_module_parameter(m, "softmax_offset");
            te_backward(te_sum_all(y));
            EXPECT(s, te_ok(te));
            if (!te_ok(te)) return;
            y = te_tensor_view(y, 4, (const int64_t[]){S, B, -1, D});
            if (!run) y = te_tensor_contiguous(te_tensor_narrow(y, 2, first, own));
            out[run] = (float *)malloc((size_t)(S * B * own * D) * sizeof(float));
            te_tensor_to_f32(y, out[run]);
            te_tensor_to_f32(args.outputs.max_logit, logit);
            offset[run] = (float *)calloc(2 * H, sizeof(float));
            memcpy(offset[run], logit + (run ? 0 : first), (size_t)own * sizeof(float));
            if (sink) {
                float grad[H];
                EXPECT(s, te_tensor_numel(sink) == (run ? own : H));
                te_tensor_to_f32(te_tensor_grad(sink), grad);
                memcpy(offset[run] + H, grad + (run ? 0 : first), (size_t)own * sizeof(float));
            }
            te_module_destroy(m);
        }
        /* each head is computed by itself, in one order */
        EXPECT(s, memcmp(out[0], out[1], (size_t)(S * B * own * D) * sizeof(float)) == 0);
        EXPECT(s, memcmp(offset[0], offset[1], 2 * H * sizeof(float)) == 0);
        for (int run = 0; run < 2; run++) free(out[run]), free(offset[run]);
    }
}
TE_TEST(attention_options_on_ranks) {
    for (int size = 2; size <= 4; size *= 2) run_ranks(size, shared_heads, NULL);
}

/* ---- refusals ---- */

typedef struct refusal {
    te_attn_options o;
    te_attn_call c;
    te_result code;
    const char *says;
} refusal;
TE_TEST(attention_options_refusals) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(S, B, H, D)), *t = te_tensor_zeros(te, TE_F32, SHAPE(10, H, D)), *cu = starts(te, q_lengths, 0);
    te_tensor *packed = te_tensor_zeros(te, TE_F32, SHAPE(S, B, 3, H, D)), *down = test_i32(te, SHAPE(3), (const int64_t[]){0, 6, 4}), *beyond = test_i32(te, SHAPE(3), (const int64_t[]){0, 4, 11});
    te_tensor *floats = te_tensor_zeros(te, TE_F32, SHAPE(B, 1, 1, S)), *narrow = te_tensor_zeros(te, TE_U8, SHAPE(B, 1, 1, 4)), *mask = te_tensor_zeros(te, TE_U8, SHAPE(B, 1, 1, S));
    te_ctx *other = test_context("cpu");
    te_tensor *elsewhere = starts(other, q_lengths, 0);
    const refusal list[] = {
        {{.attn_mask_type = TE_MASK_PADDING}, {0}, TE_ERR_INVALID, "cu_seqlens_q and cu_seqlens_kv are NULL under a padding mask"},
        {{.attn_mask_type = TE_MASK_PADDING, .attention_type = TE_ATTENTION_CROSS}, {.cu_seqlens_q = cu}, TE_ERR_INVALID, "cu_seqlens_kv is NULL under a padding mask"},
        {{.attn_mask_type = TE_MASK_PADDING, .attention_type = TE_ATTENTION_CROSS}, {.attention_mask = mask}, TE_ERR_INVALID, "attention_mask_q and attention_mask, in place of them"},
        {{.attn_mask_type = TE_MASK_PADDING}, {.attention_mask = floats}, TE_ERR_DTYPE, "attention_mask is f32 [2, 1, 1, 6]; of 2 sequences of 6 tokens u8 [2, 1, 1, 6] is needed"},
        {{.attn_mask_type = TE_MASK_PADDING}, {.attention_mask = narrow}, TE_ERR_SHAPE, "attention_mask is u8 [2, 1, 1, 4]; of 2 sequences of 6 tokens"},
        {{.attn_mask_type = TE_MASK_PADDING}, {.cu_seqlens_q = elsewhere}, TE_ERR_INVALID, "belongs to another context"},
        {{0}, {.cu_seqlens_q = cu}, TE_ERR_INVALID, "cu_seqlens with attn_mask_type 2; lengths belong to masks with padding (4 to 6)"},
        {{.attn_mask_type = TE_MASK_ARBITRARY}, {0}, TE_ERR_INVALID, "attention_mask is NULL with attn_mask_type 7"},
        {{0}, {.attn_mask_type = (te_attn_mask)8}, TE_ERR_INVALID, "attn_mask_type 8"},
        {{.qkv_format = TE_THD}, {.cu_seqlens_q = cu}, TE_ERR_INVALID, "attn_mask_type 2 with qkv_format TE_THD; packed sequences need a mask with padding (4 to 6)"},
        {{.qkv_format = TE_THD, .attn_mask_type = TE_MASK_PADDING}, {.attention_mask = mask}, TE_ERR_INVALID, "NULL under a padding mask; give both"},
        {{.qkv_format = TE_THD, .attn_mask_type = TE_MASK_PADDING}, {.cu_seqlens_q = down}, TE_ERR_INVALID, "cu_seqlens_q[1] is 6 and [2] is 4; starts must not descend"},
        {{.qkv_format = TE_THD, .attn_mask_type = TE_MASK_PADDING}, {.cu_seqlens_q = beyond}, TE_ERR_INVALID, "sequence 1 has rows 4 to 10; there are 10"},
        {{.qkv_format = TE_THD, .attn_mask_type = TE_MASK_PADDING}, {.cu_seqlens_q = cu, .pad_between_seqs = TE_ON}, TE_ERR_INVALID, "pad_between_seqs is TE_ON (1) and cu_seqlens_q_padded NULL"},
        {{0}, {.window = {true, -1, 2}}, TE_ERR_INVALID, "window (-1, 2) with attn_mask_type 2; under causal masks (left, 0) is possible"},
        {{0}, {.window = {true, -2, 0}}, TE_ERR_INVALID, "window (-2, 0) with attn_mask_type 2"},
        {{.attn_mask_type = TE_MASK_NONE, .window = {true, 3, -1}}, {0}, TE_ERR_INVALID, "window (3, -1) with attn_mask_type 1"},
        {{0}, {.core_attention_bias_type = TE_ATTN_BIAS_POST_SCALE}, TE_ERR_STATE, "core_attention_bias is NULL"},
        {{0}, {.core_attention_bias = floats}, TE_ERR_INVALID, "core_attention_bias belongs to TE_ATTN_BIAS_PRE_SCALE or TE_ATTN_BIAS_POST_SCALE"},
        {{0}, {.core_attention_bias_type = (te_attn_bias)4}, TE_ERR_INVALID, "core_attention_bias_type is 4"},
        {{0}, {.alibi_slopes = te_tensor_zeros(te, TE_F32, SHAPE(H))}, TE_ERR_INVALID, "alibi_slopes belongs to TE_ATTN_BIAS_ALIBI"},
        {{0}, {.core_attention_bias_type = TE_ATTN_BIAS_ALIBI, .alibi_slopes = te_tensor_zeros(te, TE_F32, SHAPE(3))}, TE_ERR_SHAPE, "alibi_slopes is [3]; [4] or [2, 4] is needed"},
        {{0}, {.qkv_layer = packed}, TE_ERR_INVALID, "qkv_layer is given, and input too"},
        {{0}, {.kv_layer = packed}, TE_ERR_INVALID, "kv_layer is given, and key or value too"},
        {{0}, {.qkv_interleave_dim = -2}, TE_ERR_INVALID, "qkv_interleave_dim -2 without a packed tensor"},
    };
    for (int i = 0; i < COUNT(list); i++) {
        te_dot_product_attention_desc d = {.attention = list[i].o};
        te_forward_args args = {.attention = list[i].c};
        d.attention.num_attention_heads = H, d.attention.kv_channels = D;
        args.input = args.key = args.value = d.attention.qkv_format == TE_THD ? t : x;
        test_case("%s", list[i].says);
        te_module *m = te_dot_product_attention_create(te, &d);
        REQUIRE_OK(te);
        CHECK(!te_forward_with(m, &args));
        CHECK_ERROR(te, list[i].code, list[i].says);
        te_module_destroy(m);
    }
    static const struct {
        te_attn_options o;
        const char *says;
    } descs[] = {{{.softmax_type = (te_softmax_type)3}, "attention.softmax_type 3"},
                 {{.bottom_right_diagonal = (te_switch)3}, "attention.bottom_right_diagonal 3"},
                 {{.attention_dropout = 1.5f}, "attention.attention_dropout 1.5"},
                 {{.attention_dropout = -0.5f}, "attention.attention_dropout -0.5"},
                 {{.num_gqa_groups = 3}, "4 heads of 8 channels in 3 groups; the groups must divide the heads"}};
    for (int i = 0; i < COUNT(descs); i++) {
        te_dot_product_attention_desc d = {.attention = descs[i].o};
        d.attention.num_attention_heads = H, d.attention.kv_channels = D;
        CHECK(!te_dot_product_attention_create(te, &d));
        CHECK_ERROR(te, TE_ERR_INVALID, descs[i].says);
    }
    te_dot_product_attention_desc d = {.attention.num_attention_heads = H, .attention.kv_channels = D};
    te_module *m = te_dot_product_attention_create(te, &d);
    te_forward_args args = {.attention.qkv_layer = packed, .attention.qkv_interleave_dim = -2};
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_SHAPE, "qkv_layer is [6, 2, 3, 4, 8] and qkv_interleave_dim -2; [.., H, 3, d] of 5 dimensions is needed");
    args.attention.qkv_interleave_dim = 1;
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_INVALID, "qkv_interleave_dim 1; -3 and -2 are possible");
    te_module_destroy(m);
    te_multihead_attention_desc a = {.hidden_size = WIDE, .attention.num_attention_heads = H, .attention.qkv_format = TE_THD, .gemm.params_dtype = TE_F32};
    te_rotary_desc rotary = {0};
    m = te_multihead_attention_create(te, &a);
    args = (te_forward_args){.input = te_tensor_zeros(te, TE_F32, SHAPE(10, WIDE)), .rotary = &rotary, .attention.attn_mask_type = TE_MASK_PADDING};
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_INVALID, "rotary with qkv_format TE_THD and cu_seqlens_q NULL");
    args.input = te_tensor_zeros(te, TE_F32, SHAPE(5, 2, WIDE));
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_SHAPE, "the input is [5, 2, 32]; [tokens, h] is needed");
    args.attention.kv_layer = packed, args.input = te_tensor_zeros(te, TE_F32, SHAPE(10, WIDE));
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_INVALID, "MultiheadAttention: kv_layer is given");
    te_module_destroy(m);
    te_transformer_layer_desc l = {.hidden_size = WIDE, .ffn_hidden_size = WIDE, .attention.num_attention_heads = H, .enc_dec_bottom_right_diagonal = TE_ON};
    CHECK(!te_transformer_layer_create(te, &l));
    CHECK_ERROR(te, TE_ERR_INVALID, "enc_dec_bottom_right_diagonal");
}
