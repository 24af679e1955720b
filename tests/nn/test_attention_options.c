/* The options of attention in its three modules, each against te_attention, which test_attn_extras.c holds against formulas: bytes of outputs and gradients where both run the very same
 * operations; checkpoints, finite differences, ranks, refusals. */
#include "../dist/ranks.h"

enum { S = 6, S_KV = 9, B = 2, H = 4, G = 2, D = 8, DV = 12, WIDE = 32 };

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

/* Lengths: two sequences of 4 and 6 queries (all that there are), and of 9 and 5 keys; of self attention, those of queries. */
static const int64_t q_lengths[B] = {4, 6}, kv_lengths[B] = {9, 5};
static const int64_t *lengths_of(const acase *c, bool keys) { return keys && c->cross ? kv_lengths : q_lengths; }
static int64_t longest(const acase *c, bool keys) { return keys && c->cross ? S_KV : S; }
static te_tensor *starts(te_ctx *te, const int64_t *length, int64_t gap) {
    const int64_t at[3] = {0, length[0] + gap, length[0] + length[1] + 2 * gap};
    return test_i32(te, SHAPE(3), at);
}
static te_tensor *padding(te_ctx *te, const int64_t *length, int64_t s) {
    uint8_t *mask = (uint8_t *)test_alloc((size_t)(B * s));
    for (int64_t i = 0; i < B * s; i++) mask[i] = i % s >= length[i / s];
    return te_tensor_from_host(te, TE_U8, SHAPE(B, 1, 1, s), mask);
}
static te_tensor *leaf(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, uint64_t seed) {
    return te_tensor_set_requires_grad(test_tensor(te, dtype, ndim, shape, test_normal(test_numel(ndim, shape), seed)), true);
}
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
    te_attention_desc hand;
} inputs;
static inputs make_inputs(te_ctx *te, const acase *c, te_dtype dtype) {
    inputs in;
    const bool all = c->packed == QKV || c->packed == QKV_HEADS, keys = c->packed == KV || c->packed == KV_HEADS;
    const int groups = all ? H : G, d_v = c->packed ? D : DV;
    te_attention_call *a = &in.args.attention;
    te_attn_extras *x = &in.hand.extras;
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
        if (c->padded) a->cu_seqlens_q_padded = starts(te, q_lengths, 2), a->cu_seqlens_kv_padded = starts(te, lengths_of(c, true), 2);
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
    in.hand.mask = c->mask;
    in.hand.window = c->window;
    in.hand.dropout_p = c->dropout;
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
            in.leaf[4] = in.hand.extras.softmax_offset = te_module_parameter(m, "softmax_offset");
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
        float *got = test_read(te_forward_with(m, &args)), *want = test_read(te_attention(x, x, x, &(te_attention_desc){.mask = rules[i].mask, .window = rules[i].means}));
        REQUIRE_OK(te);
        CHECK_BYTES("out", got, want, S * B * H * D * sizeof(float));
        te_module_destroy(m);
    }
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

/* ---- MultiheadAttention ---- */

typedef struct mha_case {
    const char *name;
    te_qkv_format format;
    te_attn_mask mask;
    te_qk_norm norm;
    bool before_rope, rotary, cross, by_mask, padded, learnable;
} mha_case;
static const mha_case mha_cases[] = {
    {.name = "packed sequences", .format = TE_THD, .mask = TE_MASK_PADDING_CAUSAL, .rotary = true},
    {.name = "packed sequences with padding", .format = TE_THD, .mask = TE_MASK_PADDING_CAUSAL, .rotary = true, .padded = true, .learnable = true},
    {.name = "packed sequences, cross", .format = TE_THD, .mask = TE_MASK_PADDING, .rotary = true, .cross = true},
    {.name = "padding by a mask", .mask = TE_MASK_PADDING, .by_mask = true, .rotary = true},
    {.name = "L2", .mask = TE_MASK_CAUSAL, .norm = TE_QK_NORM_L2, .rotary = true},
    {.name = "L2 before the rotation, bshd", .format = TE_BSHD, .mask = TE_MASK_CAUSAL, .norm = TE_QK_NORM_L2, .before_rope = true, .rotary = true},
    {.name = "L2, packed sequences", .format = TE_THD, .mask = TE_MASK_PADDING_CAUSAL, .norm = TE_QK_NORM_L2, .rotary = true, .learnable = true},
};
static te_module *make_mha(te_ctx *te, const mha_case *c) {
    te_multihead_attention_desc d = {.hidden_size = WIDE, .attention.num_attention_heads = H, .attention.num_gqa_groups = G, .attention.kv_channels = D, .gemm.params_dtype = TE_F32};
    d.attention.qkv_format = c->format;
    d.attention.attn_mask_type = c->mask;
    d.attention.qk_norm_type = c->norm;
    d.attention.qk_norm_before_rope = c->before_rope;
    d.attention.no_qkv_weight_interleaved = true;
    d.attention.attention_type = c->cross ? TE_ATTENTION_CROSS : TE_ATTENTION_SELF;
    d.attention.softmax_type = c->learnable ? TE_SOFTMAX_LEARNABLE : TE_SOFTMAX_VANILLA;
    d.gemm.init.std = d.output_layer_init.std = 0.2f;
    return te_multihead_attention_create(te, &d);
}
static te_forward_args mha_call(te_ctx *te, const mha_case *c, const te_rotary_desc *rotary, te_tensor *x, te_tensor *encoder) {
    te_forward_args args = {.input = x, .encoder_output = encoder, .rotary = c->rotary ? rotary : NULL};
    if (c->format == TE_THD) args.attention.cu_seqlens_q = starts(te, q_lengths, 0);
    if (c->format == TE_THD && c->cross) args.attention.cu_seqlens_kv = starts(te, kv_lengths, 0);
    if (c->padded) args.attention.cu_seqlens_q_padded = starts(te, q_lengths, 2);
    if (c->by_mask) args.attention.attention_mask = padding(te, q_lengths, S);
    return args;
}
static te_tensor *project(te_module *m, const char *child, te_tensor *x) {
    te_module *c = te_module_find(m, child);
    return te_linear(x, te_module_parameter(c, "weight"), te_module_parameter(c, "bias"));
}
/* Heads from..from + n - 1 of x [.., all * D]. */
static te_tensor *heads_of(te_tensor *x, int64_t from, int64_t n) {
    const int last = te_tensor_ndim(x) - 1;
    int64_t shape[5];
    memcpy(shape, te_tensor_shape(x), (size_t)last * sizeof *shape);
    shape[last] = n, shape[last + 1] = D;
    return te_tensor_view(te_tensor_contiguous(te_tensor_narrow(x, last, from * D, n * D)), last + 2, shape);
}
/* Each sequence of packed tokens by itself, rotated from its own first position. */
static te_tensor *rotated(te_tensor *x, const mha_case *c, const te_rotary_desc *rotary, const int64_t *length) {
    te_tensor *out[5];
    int64_t at = 0;
    int n = 0;
    if (c->format != TE_THD) return te_apply_rotary_pos_emb(x, rotary, c->format);
    for (int b = 0; b < B; b++) { /* padding behind a sequence is rotated with it */
        const int64_t *s = te_tensor_shape(x), rows = length[b] + (c->padded ? 2 : 0);
        te_tensor *one = te_tensor_view(te_tensor_contiguous(te_tensor_narrow(x, 0, at, rows)), 4, (const int64_t[]){rows, 1, s[1], s[2]});
        out[n++] = te_tensor_view(te_apply_rotary_pos_emb(one, rotary, TE_SBHD), 3, (const int64_t[]){rows, s[1], s[2]});
        at += rows;
    }
    return te_concat(out, n, 0);
}
static te_tensor *mha_by_hand(te_ctx *te, te_module *m, const mha_case *c, const te_rotary_desc *rotary, te_tensor *x, te_tensor *encoder) {
    te_tensor *qx = project(m, c->cross ? "query_layer" : "qkv", x), *kx = c->cross ? project(m, "key_value", encoder) : qx, *part[3], *o;
    te_attention_desc a = {.format = c->format, .mask = c->mask};
    int64_t shape[3];
    part[0] = heads_of(qx, 0, H);
    part[1] = heads_of(kx, c->cross ? 0 : H, G);
    part[2] = heads_of(kx, c->cross ? G : H + G, G);
    for (int i = 0; i < 2; i++) {
        if (c->norm && c->before_rope) part[i] = te_l2_normalization(part[i], 0);
        if (c->rotary) part[i] = rotated(part[i], c, rotary, i && c->cross ? kv_lengths : q_lengths);
        if (c->norm && !c->before_rope) part[i] = te_l2_normalization(part[i], 0);
    }
    if (c->mask >= TE_MASK_PADDING) a.extras.cu_seqlens_q = starts(te, q_lengths, 0), a.extras.cu_seqlens_kv = starts(te, c->cross ? kv_lengths : q_lengths, 0);
    if (c->padded) a.extras.cu_seqlens_q_padded = a.extras.cu_seqlens_kv_padded = starts(te, q_lengths, 2);
    if (c->learnable) a.extras.softmax_type = TE_SOFTMAX_LEARNABLE, a.extras.softmax_offset = te_module_parameter(te_module_find(m, "core_attention"), "softmax_offset");
    o = te_attention(part[0], part[1], part[2], &a);
    memcpy(shape, te_tensor_shape(o), sizeof shape);
    shape[te_tensor_ndim(o) - 2] = H * D;
    return project(m, "proj", te_tensor_view(o, te_tensor_ndim(o) - 1, shape));
}
TE_TEST_DEVICES(attention_options_of_multihead_attention) {
    for (int n = 0; n < COUNT(mha_cases); n++) {
        const mha_case *c = &mha_cases[n];
        const te_rotary_desc rotary = {.base = 100, .rotary_percent = 0.5f};
        const int64_t tokens = q_lengths[0] + q_lengths[1] + (c->padded ? 4 : 0);
        float *grads[2][3] = {{NULL}};
        te_tensor *y[2], *x, *encoder = NULL;
        te_module *m = make_mha(te, c), *q_norm = te_module_find(m, "q_norm");
        test_case("%s", c->name);
        REQUIRE_OK(te);
        CHECK((q_norm != NULL) == (c->norm != TE_QK_NORM_NONE));
        if (q_norm) CHECK(te_module_num_parameters(q_norm) == 0);
        x = c->format == TE_THD ? leaf(te, TE_F32, SHAPE(tokens, WIDE), 1) : c->format == TE_BSHD ? leaf(te, TE_F32, SHAPE(B, S, WIDE), 1) : leaf(te, TE_F32, SHAPE(S, B, WIDE), 1);
        if (c->cross) encoder = leaf(te, TE_F32, SHAPE(kv_lengths[0] + kv_lengths[1], WIDE), 2);
        if (c->learnable) te_tensor_copy_from_host(te_module_parameter(te_module_find(m, "core_attention"), "softmax_offset"), test_normal(H, 9));
        te_tensor *weight = te_module_parameter(te_module_find(m, c->cross ? "key_value" : "qkv"), "weight");
        for (int run = 0; run < 2; run++) {
            te_forward_args args = mha_call(te, c, &rotary, x, encoder);
            te_tensor_zero_grad(x), te_module_zero_grad(m);
            if (encoder) te_tensor_zero_grad(encoder);
            y[run] = run ? mha_by_hand(te, m, c, &rotary, x, encoder) : te_forward_with(m, &args);
            REQUIRE_OK(te);
            te_backward_from(y[run], test_tensor(te, TE_F32, te_tensor_ndim(y[run]), te_tensor_shape(y[run]), test_normal(te_tensor_numel(y[run]), 5)));
            grads[run][0] = test_read(te_tensor_grad(x));
            grads[run][1] = test_read(te_tensor_grad(weight));
            grads[run][2] = encoder ? test_read(te_tensor_grad(encoder)) : NULL;
            REQUIRE_OK(te);
        }
        CHECK_BYTES("out", test_read(y[0]), test_read(y[1]), (size_t)te_tensor_numel(y[1]) * sizeof(float));
        /* the gradients of the parts meet in another order than those of narrow's copies: one rounding of f32 in each of a few sums */
        CHECK_CLOSE("dx", grads[0][0], grads[1][0], te_tensor_numel(x), 1e-5, 1e-6);
        CHECK_CLOSE("dweight", grads[0][1], grads[1][1], te_tensor_numel(weight), 1e-5, 1e-6);
        if (encoder) CHECK_CLOSE("dencoder", grads[0][2], grads[1][2], te_tensor_numel(encoder), 1e-5, 1e-6);
        te_module_destroy(m);
    }
}
typedef struct mha_user {
    te_module *m;
    const mha_case *c;
} mha_user;
static te_tensor *of_mha(te_ctx *te, te_tensor *const *in, void *user) {
    const mha_user *u = (const mha_user *)user;
    const te_rotary_desc rotary = {.base = 100, .rotary_percent = 0.5f};
    te_forward_args args = mha_call(te, u->c, &rotary, in[0], in[2]);
    return te_forward_with(u->m, &args);
}
TE_TEST_DEVICES(attention_options_finite_differences_of_multihead_attention) {
    static const int which[] = {1, 2, 4};
    for (int i = 0; i < COUNT(which); i++) {
        mha_user u = {NULL, &mha_cases[which[i]]};
        const int64_t tokens = q_lengths[0] + q_lengths[1] + (u.c->padded ? 4 : 0);
        test_case("%s", u.c->name);
        u.m = make_mha(te, u.c);
        REQUIRE_OK(te);
        te_tensor *x = u.c->format == TE_THD ? leaf(te, TE_F32, SHAPE(tokens, WIDE), 1) : leaf(te, TE_F32, SHAPE(S, B, WIDE), 1);
        te_tensor *in[] = {x, te_module_parameter(te_module_find(u.m, u.c->cross ? "query_layer" : "qkv"), "weight"),
                           u.c->cross ? leaf(te, TE_F32, SHAPE(kv_lengths[0] + kv_lengths[1], WIDE), 2) : NULL};
        test_check_gradients(te, of_mha, u.c->cross ? 3 : 2, in, &u, 2e-2, 2e-3);
        te_module_destroy(u.m);
    }
}

/* ---- TransformerLayer ---- */

static te_attention_call seen[2]; /* by the cores of self and of cross attention */
static te_result watch_self(te_module *m, te_forward_args *args) { return seen[0] = args->attention, te_module_get_class(m)->forward(m, args); }
static te_result watch_cross(te_module *m, te_forward_args *args) { return seen[1] = args->attention, te_module_get_class(m)->forward(m, args); }

/* Self attention's options reach its core, and cross attention's theirs: then both are MultiheadAttention, which is held against functions above. */
TE_TEST_DEVICES(attention_options_of_a_layer) {
    static const te_attn_mask masks[] = {TE_MASK_DEFAULT, TE_MASK_NONE, TE_MASK_PADDING, TE_MASK_PADDING_CAUSAL, TE_MASK_ARBITRARY};
    for (int n = 0; n < COUNT(masks) * COUNT(masks) * 2; n++) {
        const te_attn_mask self = masks[n / 2 % COUNT(masks)], cross = masks[n / 2 / COUNT(masks)];
        const bool by_call = n % 2, pads = self == TE_MASK_PADDING || self == TE_MASK_PADDING_CAUSAL, cross_pads = cross == TE_MASK_PADDING || cross == TE_MASK_PADDING_CAUSAL;
        te_transformer_layer_desc d = {.hidden_size = WIDE, .ffn_hidden_size = WIDE, .attention.num_attention_heads = H, .layer_type = TE_LAYER_DECODER, .gemm.params_dtype = TE_F32};
        te_forward_args args = {.input = leaf(te, TE_F32, SHAPE(S, B, WIDE), 1), .encoder_output = leaf(te, TE_F32, SHAPE(S_KV, B, WIDE), 2)};
        test_case("masks %d and %d, by the %s", (int)self, (int)cross, by_call ? "call" : "desc");
        d.enc_dec_bottom_right_diagonal = by_call ? TE_ON : TE_OFF;
        d.attention.softmax_type = TE_SOFTMAX_LEARNABLE;
        d.attention.return_max_logit = true;
        if (by_call) {
            args.attention.attn_mask_type = self, args.cross.enc_dec_attn_mask_type = cross;
            args.attention.window = (te_window){true, 3, 0}, args.cross.enc_dec_window = (te_window){true, 5, 1};
            args.cross.enc_dec_bottom_right_diagonal = TE_OFF, args.attention.bottom_right_diagonal = TE_OFF;
            if (self != TE_MASK_DEFAULT && self != TE_MASK_PADDING_CAUSAL) args.attention.window.right = 2;
            if (cross == TE_MASK_PADDING_CAUSAL) args.cross.enc_dec_window.right = 0;
        } else
            d.attention.attn_mask_type = self, d.enc_dec_attn_mask_type = cross;
        te_attention_call *a = &args.attention;
        if (pads || cross_pads) a->cu_seqlens_q = starts(te, q_lengths, 0), a->cu_seqlens_kv = starts(te, kv_lengths, 0);
        if (self == TE_MASK_ARBITRARY) a->attention_mask = te_tensor_zeros(te, TE_U8, SHAPE(B, 1, S, S));
        if (cross == TE_MASK_ARBITRARY) args.cross.enc_dec_attn_mask = te_tensor_zeros(te, TE_U8, SHAPE(1, 1, S, S_KV));
        te_module *m = te_transformer_layer_create(te, &d);
        REQUIRE_OK(te);
        te_module_set_forward(te_module_find(m, "self_attention.core_attention"), watch_self);
        te_module_set_forward(te_module_find(m, "inter_attention.core_attention"), watch_cross);
        memset(seen, 0, sizeof seen);
        te_tensor *y = te_forward_with(m, &args);
        REQUIRE_OK(te);
        te_backward_from(y, te_tensor_full(te, TE_F32, SHAPE(S, B, WIDE), 1));
        REQUIRE_OK(te);
        CHECK(te_tensor_grad(te_module_parameter(te_module_find(m, "inter_attention.core_attention"), "softmax_offset")));
        CHECK(args.outputs.max_logit && te_tensor_numel(args.outputs.max_logit) == H);
        CHECK(seen[0].attn_mask_type == (by_call ? self : 0) && seen[1].attn_mask_type == (by_call ? cross : 0));
        CHECK(seen[0].cu_seqlens_q == (pads ? a->cu_seqlens_q : NULL) && seen[0].cu_seqlens_kv == seen[0].cu_seqlens_q);
        CHECK(seen[1].cu_seqlens_q == (cross_pads ? a->cu_seqlens_q : NULL) && seen[1].cu_seqlens_kv == (cross_pads ? a->cu_seqlens_kv : NULL));
        CHECK(seen[0].attention_mask == a->attention_mask && seen[1].attention_mask == args.cross.enc_dec_attn_mask);
        CHECK(seen[0].window.left == a->window.left && seen[1].window.left == args.cross.enc_dec_window.left);
        CHECK(seen[0].bottom_right_diagonal == a->bottom_right_diagonal && seen[1].bottom_right_diagonal == args.cross.enc_dec_bottom_right_diagonal);
        te_module_destroy(m);
    }
}

/* Padding does not reach into tokens: those of each sequence are what the sequence alone gives, in all three formats; and none of their gradients comes from padding. */
TE_TEST_DEVICES(attention_options_padding_changes_no_token) {
    const te_rotary_desc rotary = {.base = 100};
    te_transformer_layer_desc d = {.hidden_size = WIDE, .ffn_hidden_size = WIDE, .attention.num_attention_heads = H, .attention.num_gqa_groups = G, .gemm.params_dtype = TE_F32,
                                   .gemm.init.std = 0.2f, .output_layer_init.std = 0.2f, .attention.attn_mask_type = TE_MASK_PADDING_CAUSAL};
    float *x[B], *y[B], *dx[B], *dy[B];
    for (int format = TE_SBHD; format <= TE_THD; format++) {
        const int64_t tokens = q_lengths[0] + q_lengths[1];
        d.attention.qkv_format = (te_qkv_format)format;
        te_seed(te, 3);
        te_module *m = te_transformer_layer_create(te, &d);
        test_case("format %d", format);
        REQUIRE_OK(te);
        for (int b = 0; b < B; b++) { /* alone */
            x[b] = test_normal(q_lengths[b] * WIDE, 1 + (uint64_t)b), dy[b] = test_normal(q_lengths[b] * WIDE, 7 + (uint64_t)b);
            const int64_t n = q_lengths[b], s3[3] = {format == TE_BSHD ? 1 : n, format == TE_BSHD ? n : 1, WIDE}, s2[2] = {n, WIDE}, *shape = format == TE_THD ? s2 : s3;
            const int ndim = format == TE_THD ? 2 : 3;
            te_tensor *in = te_tensor_set_requires_grad(test_tensor(te, TE_F32, ndim, shape, x[b]), true);
            te_forward_args args = {.input = in, .rotary = &rotary, .attention.cu_seqlens_q = test_i32(te, SHAPE(2), (const int64_t[]){0, n})};
            te_tensor *out = te_forward_with(m, &args);
            y[b] = test_read(out);
            te_backward_from(out, test_tensor(te, TE_F32, ndim, shape, dy[b]));
            dx[b] = test_read(te_tensor_grad(in));
            REQUIRE_OK(te);
        }
        const int64_t rows = format == TE_THD ? tokens : S * B, s3[3] = {format == TE_BSHD ? B : S, format == TE_BSHD ? S : B, WIDE}, s2[2] = {tokens, WIDE};
        const int64_t *shape = format == TE_THD ? s2 : s3;
        const int ndim = format == TE_THD ? 2 : 3;
        float *all = test_normal(rows * WIDE, 50), *grad = test_floats(rows * WIDE);
        int64_t row[B][S];
        for (int b = 0; b < B; b++)
            for (int64_t i = 0; i < q_lengths[b]; i++) {
                row[b][i] = format == TE_THD ? b * q_lengths[0] + i : format == TE_BSHD ? b * S + i : i * B + b;
                memcpy(all + row[b][i] * WIDE, x[b] + i * WIDE, WIDE * sizeof(float));
                memcpy(grad + row[b][i] * WIDE, dy[b] + i * WIDE, WIDE * sizeof(float));
            }
        te_tensor *in = te_tensor_set_requires_grad(test_tensor(te, TE_F32, ndim, shape, all), true);
        te_forward_args args = {.input = in, .rotary = &rotary};
        if (format == TE_THD) args.attention.cu_seqlens_q = starts(te, q_lengths, 0);
        else args.attention.attention_mask = padding(te, q_lengths, S);
        te_tensor *out = te_forward_with(m, &args);
        float *got = test_read(out);
        te_backward_from(out, test_tensor(te, TE_F32, ndim, shape, grad));
        float *dgot = test_read(te_tensor_grad(in));
        REQUIRE_OK(te);
        for (int b = 0; b < B; b++)
            for (int64_t i = 0; i < q_lengths[b]; i++) { /* sums over channels may be cut elsewhere in a larger product; TF32 products on CUDA */
                const double near = te_ctx_is_cuda(te) ? 5e-3 : 1e-5;
                CHECK_CLOSE("y", got + row[b][i] * WIDE, y[b] + i * WIDE, WIDE, near, near);
                CHECK_CLOSE("dx", dgot + row[b][i] * WIDE, dx[b] + i * WIDE, WIDE, near, near);
            }
        te_module_destroy(m);
    }
}

/* A layer that runs again, and one that is two graphs, with masks, biases and slopes among their inputs. */
TE_TEST_DEVICES(attention_options_run_again) {
    float *want[3] = {NULL};
    for (int how = 0; how < 3; how++) {
        te_transformer_layer_desc d = {.hidden_size = WIDE, .ffn_hidden_size = WIDE, .attention.num_attention_heads = H, .attention.attn_mask_type = TE_MASK_PADDING_CAUSAL};
        te_tensor *x = leaf(te, TE_BF16, SHAPE(S, B, WIDE), 1), *bias = leaf(te, TE_BF16, SHAPE(1, H, S, S), 2);
        te_forward_args args = {.input = x, .attention.attention_mask = padding(te, q_lengths, S), .attention.core_attention_bias_type = TE_ATTN_BIAS_POST_SCALE,
                                .attention.core_attention_bias = bias};
        te_seed(te, 3);
        te_module *m = te_transformer_layer_create(te, &d);
        test_case("%s", how == 0 ? "as usual" : how == 1 ? "checkpointed" : "graphed");
        REQUIRE_OK(te);
        if (how == 1) te_module_set_checkpoint(m, true);
        if (how == 2) te_make_graphed_callables(te, &m, &args, 1, NULL);
        REQUIRE_OK(te);
        te_tensor *y = te_forward_with(m, &args);
        te_backward_from(y, te_tensor_full(te, TE_BF16, SHAPE(S, B, WIDE), 1));
        REQUIRE_OK(te);
        float *got[3] = {test_read(y), test_read(te_tensor_grad(x)), test_read(te_tensor_grad(bias))};
        for (int i = 0; i < 3; i++) {
            if (how) CHECK_BYTES(i == 0 ? "y" : i == 1 ? "dx" : "dbias", got[i], want[i], (i < 2 ? S * B * WIDE : H * S * S) * sizeof(float));
            else want[i] = got[i];
        }
        te_module_destroy(m);
    }
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
    te_attention_options o;
    te_attention_call c;
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
        {{0}, {.score_mod = (te_score_mod *)x}, TE_ERR_UNSUPPORTED, "attention.score_mod"},
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
        te_attention_options o;
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
