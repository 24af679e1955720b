/* The options of attention in MultiheadAttention and TransformerLayer: against the same made of functions, against each sequence by itself, and by what reaches the cores; run again and as
 * graphs. */
#include "attention.h"

/* ---- MultiheadAttention ---- */

typedef struct mha_case {
    const char *name;
    te_qkv_format format;
    te_attn_mask mask;
    te_qk_norm norm;
    bool before_rope, rotary, cross, by_mask, padded, learnable;
    te_attn_bias bias;
    te_window window;
    te_switch bottom_right;
} mha_case;
static const mha_case mha_cases[] = {
    {.name = "packed sequences", .format = TE_THD, .mask = TE_MASK_PADDING_CAUSAL, .rotary = true},
    {.name = "packed sequences with padding", .format = TE_THD, .mask = TE_MASK_PADDING_CAUSAL, .rotary = true, .padded = true, .learnable = true},
    {.name = "packed sequences, cross", .format = TE_THD, .mask = TE_MASK_PADDING, .rotary = true, .cross = true},
    {.name = "padding by a mask", .mask = TE_MASK_PADDING, .by_mask = true, .rotary = true},
    {.name = "L2", .mask = TE_MASK_CAUSAL, .norm = TE_QK_NORM_L2, .rotary = true},
    {.name = "L2 before the rotation, bshd", .format = TE_BSHD, .mask = TE_MASK_CAUSAL, .norm = TE_QK_NORM_L2, .before_rope = true, .rotary = true},
    {.name = "L2, packed sequences", .format = TE_THD, .mask = TE_MASK_PADDING_CAUSAL, .norm = TE_QK_NORM_L2, .rotary = true, .learnable = true},
    {.name = "bias", .mask = TE_MASK_CAUSAL, .bias = TE_ATTN_BIAS_POST_SCALE, .rotary = true},
    {.name = "slopes, window", .format = TE_BSHD, .mask = TE_MASK_NONE, .bias = TE_ATTN_BIAS_ALIBI, .window = {true, 3, 1}, .bottom_right = TE_OFF},
    {.name = "packed sequences with padding, cross, slopes", .format = TE_THD, .mask = TE_MASK_PADDING, .cross = true, .padded = true, .bias = TE_ATTN_BIAS_ALIBI},
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
    if (c->padded) {
        args.attention.cu_seqlens_q_padded = starts(te, q_lengths, 2), args.attention.pad_between_seqs = TE_ON;
        if (c->cross) args.attention.cu_seqlens_kv_padded = starts(te, kv_lengths, 2);
        args.attention.max_seqlen_q = S, args.attention.max_seqlen_kv = c->cross ? S_KV : S;
    }
    args.attention.core_attention_bias_type = c->bias;
    if (c->bias == TE_ATTN_BIAS_POST_SCALE) args.attention.core_attention_bias = leaf(te, TE_F32, SHAPE(1, 1, S, S), 6);
    if (c->bias == TE_ATTN_BIAS_ALIBI) args.attention.alibi_slopes = te_tensor_full(te, TE_F32, SHAPE(B, H), 0.3);
    args.attention.window = c->window;
    args.attention.bottom_right_diagonal = c->bottom_right;
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
    te_attn_desc a = {.format = c->format, .rule.mask = c->mask, .rule.window = c->window};
    te_attn_call call = mha_call(te, c, rotary, x, encoder).attention;
    int64_t shape[3];
    part[0] = heads_of(qx, 0, H);
    part[1] = heads_of(kx, c->cross ? 0 : H, G);
    part[2] = heads_of(kx, c->cross ? G : H + G, G);
    for (int i = 0; i < 2; i++) {
        if (c->norm && c->before_rope) part[i] = te_l2_normalization(part[i], 0);
        if (c->rotary) part[i] = rotated(part[i], c, rotary, i && c->cross ? kv_lengths : q_lengths);
        if (c->norm && !c->before_rope) part[i] = te_l2_normalization(part[i], 0);
    }
    if (c->mask >= TE_MASK_PADDING) a.rule.cu_seqlens_q = starts(te, q_lengths, 0), a.rule.cu_seqlens_kv = starts(te, c->cross ? kv_lengths : q_lengths, 0);
    if (c->padded) a.rule.cu_seqlens_q_padded = starts(te, q_lengths, 2), a.rule.cu_seqlens_kv_padded = starts(te, c->cross ? kv_lengths : q_lengths, 2);
    a.rule.bottom_right_diagonal = c->bottom_right;
    a.rule.core_attention_bias_type = c->bias;
    a.rule.core_attention_bias = call.core_attention_bias;
    a.rule.alibi_slopes = call.alibi_slopes;
    if (c->learnable) a.rule.softmax_type = TE_SOFTMAX_LEARNABLE, a.rule.softmax_offset = te_module_parameter(te_module_find(m, "core_attention"), "softmax_offset");
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
        if (c->cross) encoder = leaf(te, TE_F32, SHAPE(kv_lengths[0] + kv_lengths[1] + (c->padded ? 4 : 0), WIDE), 2);
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
        /* the gradients of the parts meet in another order than those of narrow's copies: one rounding of f32 in each of a few sums, which on CUDA may move an operand of a TF32 product by
         * a unit of its last place, 2^-11 */
        const double near = te_ctx_is_cuda(te) ? 5e-3 : 1e-5, least = te_ctx_is_cuda(te) ? 5e-3 : 1e-6;
        CHECK_CLOSE("dx", grads[0][0], grads[1][0], te_tensor_numel(x), near, least);
        CHECK_CLOSE("dweight", grads[0][1], grads[1][1], te_tensor_numel(weight), near, least);
        if (encoder) CHECK_CLOSE("dencoder", grads[0][2], grads[1][2], te_tensor_numel(encoder), near, least);
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
    te = test_exact(te);
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

/* te_apply_rotary_pos_emb of packed sequences: each as by itself, in both directions, and squeezed by the longest sequence of all. */
TE_TEST_DEVICES(attention_options_rotary_of_packed_sequences) {
    te_rotary_desc rotary = {.base = 100, .seq_len_interpolation_factor = 1.25f, .pretrained_max_position_embeddings = 4};
    const mha_case c = {.format = TE_THD};
    te_tensor *x = leaf(te, TE_F32, SHAPE(10, H, D), 1), *dy = test_tensor(te, TE_F32, SHAPE(10, H, D), test_normal(10 * H * D, 2));
    float *got[2], *grad[2];
    rotary.max_seqlen = S;
    for (int run = 0; run < 2; run++) {
        te_tensor_zero_grad(x);
        rotary.cu_seqlens = run ? NULL : starts(te, q_lengths, 0);
        te_tensor *y = run ? rotated(x, &c, &rotary, q_lengths) : te_apply_rotary_pos_emb(x, &rotary, TE_THD);
        te_backward_from(y, dy);
        REQUIRE_OK(te);
        got[run] = test_read(y), grad[run] = test_read(te_tensor_grad(x));
    }
    CHECK_BYTES("y", got[0], got[1], 10 * H * D * sizeof(float));
    CHECK_BYTES("dx", grad[0], grad[1], 10 * H * D * sizeof(float));
}

/* ---- TransformerLayer ---- */

static te_attn_call seen[2]; /* by the cores of self and of cross attention */
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
        te_attn_call *a = &args.attention;
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

/* Cross attention by a pair of masks, one for the queries and one for the keys, is that by the lengths which they leave. */
TE_TEST_DEVICES(attention_options_pair_of_masks_of_a_layer) {
    te_transformer_layer_desc d = {.hidden_size = WIDE, .ffn_hidden_size = WIDE, .attention.num_attention_heads = H, .layer_type = TE_LAYER_DECODER, .gemm.params_dtype = TE_F32};
    unsigned char of_q[B * S] = {0}, of_kv[B * S_KV] = {0};
    float *y[2], *grad[2];
    for (int b = 0; b < B; b++) {
        for (int64_t t = q_lengths[b]; t < S; t++) of_q[b * S + t] = 1;
        for (int64_t t = kv_lengths[b]; t < S_KV; t++) of_kv[b * S_KV + t] = 1;
    }
    d.enc_dec_attn_mask_type = TE_MASK_PADDING;
    te_module *m = te_transformer_layer_create(te, &d);
    for (int run = 0; run < 2; run++) {
        te_forward_args args = {.input = leaf(te, TE_F32, SHAPE(S, B, WIDE), 1), .encoder_output = leaf(te, TE_F32, SHAPE(S_KV, B, WIDE), 2)};
        if (run == 0) {
            args.attention.cu_seqlens_q = starts(te, q_lengths, 0), args.attention.cu_seqlens_kv = starts(te, kv_lengths, 0);
        } else {
            args.cross.enc_dec_attn_mask_q = te_tensor_from_host(te, TE_U8, SHAPE(B, 1, 1, S), of_q);
            args.cross.enc_dec_attn_mask = te_tensor_from_host(te, TE_U8, SHAPE(B, 1, 1, S_KV), of_kv);
        }
        te_tensor *out = te_forward_with(m, &args);
        REQUIRE_OK(te);
        te_backward_from(out, te_tensor_full(te, TE_F32, SHAPE(S, B, WIDE), 1));
        REQUIRE_OK(te);
        y[run] = test_read(out), grad[run] = test_read(te_tensor_grad(args.encoder_output));
    }
    CHECK_BYTES("y", y[1], y[0], S * B * WIDE * sizeof(float));
    CHECK_BYTES("gradient of the encoder's output", grad[1], grad[0], S_KV * B * WIDE * sizeof(float));
    te_module_destroy(m);
}

/* A decoder of packed sequences: rows of padding between them change no token, and both attentions get their starts, slopes and longest lengths. */
TE_TEST_DEVICES(attention_options_of_a_packed_decoder) {
    te_transformer_layer_desc d = {.hidden_size = WIDE, .ffn_hidden_size = WIDE, .attention.num_attention_heads = H, .layer_type = TE_LAYER_DECODER, .gemm.params_dtype = TE_F32};
    float *x = test_normal(10 * WIDE, 1), *encoded = test_normal(14 * WIDE, 2), *y[2];
    d.attention.qkv_format = TE_THD;
    d.attention.attn_mask_type = TE_MASK_PADDING_CAUSAL;
    d.enc_dec_attn_mask_type = TE_MASK_PADDING;
    te_module *m = te_transformer_layer_create(te, &d);
    REQUIRE_OK(te);
    te_module_set_forward(te_module_find(m, "self_attention.core_attention"), watch_self);
    te_module_set_forward(te_module_find(m, "inter_attention.core_attention"), watch_cross);
    for (int padded = 0; padded < 2; padded++) {
        const int64_t gap = padded ? 2 : 0, rows = 10 + 2 * gap, keys = 14 + 2 * gap;
        float *in = test_normal(rows * WIDE, 60), *memory = test_normal(keys * WIDE, 61);
        for (int64_t i = 0; i < 10; i++) memcpy(in + (i + (i < q_lengths[0] ? 0 : gap)) * WIDE, x + i * WIDE, WIDE * sizeof(float));
        for (int64_t i = 0; i < 14; i++) memcpy(memory + (i + (i < kv_lengths[0] ? 0 : gap)) * WIDE, encoded + i * WIDE, WIDE * sizeof(float));
        te_forward_args args = {.input = test_tensor(te, TE_F32, SHAPE(rows, WIDE), in), .encoder_output = test_tensor(te, TE_F32, SHAPE(keys, WIDE), memory)};
        te_attn_call *a = &args.attention;
        a->cu_seqlens_q = starts(te, q_lengths, 0), a->cu_seqlens_kv = starts(te, kv_lengths, 0);
        a->max_seqlen_q = S, a->max_seqlen_kv = S_KV;
        a->core_attention_bias_type = TE_ATTN_BIAS_ALIBI, a->alibi_slopes = te_tensor_full(te, TE_F32, SHAPE(H), 0.1);
        if (padded) {
            a->cu_seqlens_q_padded = starts(te, q_lengths, 2), a->cu_seqlens_kv_padded = starts(te, kv_lengths, 2);
            a->pad_between_seqs = TE_ON;
        }
        float *got = test_read(te_forward_with(m, &args));
        REQUIRE_OK(te);
        CHECK(seen[0].max_seqlen_q == S && seen[0].max_seqlen_kv == S && seen[1].max_seqlen_q == S && seen[1].max_seqlen_kv == S_KV);
        CHECK(seen[0].cu_seqlens_kv_padded == a->cu_seqlens_q_padded && seen[1].cu_seqlens_kv_padded == a->cu_seqlens_kv_padded);
        CHECK(seen[0].alibi_slopes == a->alibi_slopes && seen[1].alibi_slopes == a->alibi_slopes && seen[1].pad_between_seqs == a->pad_between_seqs);
        y[padded] = test_floats(10 * WIDE);
        for (int64_t i = 0; i < 10; i++) memcpy(y[padded] + i * WIDE, got + (i + (i < q_lengths[0] ? 0 : gap)) * WIDE, WIDE * sizeof(float));
    }
    const double near = te_ctx_is_cuda(te) ? 5e-3 : 1e-5; /* as below */
    CHECK_CLOSE("tokens", y[1], y[0], 10 * WIDE, near, near);
    te_module_destroy(m);
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
        if (how == 2) { /* the sample has other values: what the call does not copy to the graphs shows */
            te_forward_args sample = args;
            sample.input = leaf(te, TE_BF16, SHAPE(S, B, WIDE), 5);
            sample.attention.attention_mask = te_tensor_zeros(te, TE_U8, SHAPE(B, 1, 1, S));
            sample.attention.core_attention_bias = leaf(te, TE_BF16, SHAPE(1, H, S, S), 6);
            te_make_graphed_callables(te, &m, &sample, 1, NULL);
        }
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
