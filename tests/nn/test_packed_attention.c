/* Attention to packed tensors: MultiheadAttention hands its projection to the core as it lies, and its bits are those of queries, keys and values apart. */
#include "attention.h"

enum { HEAD = 16 }; /* channels */

typedef struct packed_case {
    const char *name;
    te_qkv_format format;
    te_attn_mask mask;
    int heads, groups;
    int64_t b;
    bool apart, cross, rotary, not_interleaved, not_fused; /* apart: the core gets q, k and v each by itself anyway */
    float dropout;
    te_attn_bias bias;
    te_window window;
    te_dtype dtype;
} packed_case;
static const packed_case packed_cases[] = {
    {.name = "grouped", .mask = TE_MASK_CAUSAL, .heads = 4, .groups = 2, .b = 2, .dtype = TE_F32},
    {.name = "grouped, rotated", .mask = TE_MASK_CAUSAL, .heads = 4, .groups = 2, .b = 2, .rotary = true, .dtype = TE_BF16},
    {.name = "grouped, rotated, full, dropout", .mask = TE_MASK_NONE, .heads = 8, .groups = 2, .b = 3, .rotary = true, .dropout = 0.25f, .dtype = TE_F16},
    {.name = "grouped, a window", .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT, .heads = 4, .groups = 1, .b = 2, .window = {true, 2, 0}, .dtype = TE_F32},
    {.name = "grouped, one sequence", .mask = TE_MASK_CAUSAL, .heads = 4, .groups = 2, .b = 1, .rotary = true, .dtype = TE_BF16},
    {.name = "grouped, bshd", .format = TE_BSHD, .mask = TE_MASK_CAUSAL, .heads = 4, .groups = 2, .b = 2, .rotary = true, .apart = true, .dtype = TE_BF16},
    {.name = "grouped, slopes", .mask = TE_MASK_CAUSAL, .heads = 4, .groups = 2, .b = 2, .bias = TE_ATTN_BIAS_ALIBI, .apart = true, .dtype = TE_F32},
    {.name = "all q, all k, all v", .mask = TE_MASK_CAUSAL, .heads = 4, .groups = 2, .b = 2, .rotary = true, .not_interleaved = true, .dtype = TE_BF16},
    {.name = "all q, all k, all v, bshd, slopes", .format = TE_BSHD, .mask = TE_MASK_CAUSAL, .heads = 4, .groups = 2, .b = 2, .bias = TE_ATTN_BIAS_ALIBI, .not_interleaved = true, .dtype = TE_F32},
    {.name = "three weights, bshd, rotated", .format = TE_BSHD, .mask = TE_MASK_CAUSAL, .heads = 4, .groups = 2, .b = 2, .rotary = true, .not_fused = true, .dtype = TE_F16},
    {.name = "as many groups as heads, bshd, rotated", .format = TE_BSHD, .mask = TE_MASK_CAUSAL, .heads = 3, .groups = 3, .b = 2, .rotary = true, .dtype = TE_BF16},
    {.name = "as many groups as heads, slopes", .mask = TE_MASK_NONE, .heads = 3, .groups = 3, .b = 2, .bias = TE_ATTN_BIAS_ALIBI, .dtype = TE_F32},
    {.name = "packed sequences", .format = TE_THD, .mask = TE_MASK_PADDING_CAUSAL, .heads = 4, .groups = 2, .b = B, .not_interleaved = true, .dtype = TE_BF16},
    {.name = "packed sequences, grouped", .format = TE_THD, .mask = TE_MASK_PADDING_CAUSAL, .heads = 4, .groups = 2, .b = B, .apart = true, .dtype = TE_BF16},
    {.name = "packed sequences, as many groups as heads", .format = TE_THD, .mask = TE_MASK_PADDING, .heads = 3, .groups = 3, .b = B, .dtype = TE_F32},
    {.name = "cross", .mask = TE_MASK_NONE, .heads = 4, .groups = 2, .b = 2, .cross = true, .dtype = TE_BF16},
    {.name = "cross, all k, all v, bshd", .format = TE_BSHD, .mask = TE_MASK_NONE, .heads = 4, .groups = 2, .b = 2, .cross = true, .not_interleaved = true, .dtype = TE_F32},
    {.name = "cross, rotated", .mask = TE_MASK_NONE, .heads = 4, .groups = 2, .b = 2, .cross = true, .rotary = true, .apart = true, .dtype = TE_F32},
};
static te_module *make_packed(te_ctx *te, const packed_case *c) {
    te_multihead_attention_desc d = {.hidden_size = WIDE, .attention.num_attention_heads = c->heads, .attention.num_gqa_groups = c->groups, .attention.kv_channels = HEAD, .gemm.params_dtype = c->dtype};
    d.attention.qkv_format = c->format;
    d.attention.attn_mask_type = c->mask;
    d.attention.attention_dropout = c->dropout;
    d.attention.window = c->window;
    d.attention.no_qkv_weight_interleaved = c->not_interleaved;
    d.attention.no_fuse_qkv_params = c->not_fused;
    d.attention.attention_type = c->cross ? TE_ATTENTION_CROSS : TE_ATTENTION_SELF;
    d.gemm.init.std = d.output_layer_init.std = 0.2f;
    return te_multihead_attention_create(te, &d);
}

/* The core of somebody else, which computes what te.h's does. */
static te_result foreign_core(te_module *core, te_forward_args *args) {
    CHECK(args->input && args->key && args->value && !args->attention.qkv_layer && !args->attention.kv_layer);
    te_module_set_forward(core, NULL);
    te_forward_with(core, args);
    te_module_set_forward(core, foreign_core);
    return te_error_code(te_module_ctx(core));
}

typedef struct seen {
    int splits, in_place, elsewhere, copies; /* of the packed projection: split, rotated where it lies and to other memory */
    bool keep;                               /* retain the projection and dq, */
    te_tensor *kept, *gradient;              /* which these are */
} seen;
static void see(te_ctx *te, const te_trace *event, void *user) {
    seen *s = (seen *)user;
    const te_op_qkv_rope_args *f = (const te_op_qkv_rope_args *)event->args;
    const te_op_qkv_rope_bwd_args *b = (const te_op_qkv_rope_bwd_args *)event->args;
    const te_tensor *rotated = event->op == TE_OP_QKV_ROPE ? f->rotated : event->op == TE_OP_QKV_ROPE_BWD ? b->rotated : NULL;
    (void)te;
    if (event->phase != TE_TRACE_AFTER) return;
    s->copies += event->op == TE_OP_COPY || event->op == TE_OP_FILL;
    if (s->keep && !s->kept && event->op == TE_OP_GEMM) s->kept = te_tensor_retain(((const te_op_gemm_args *)event->args)->d);
    if (s->keep && event->op == TE_OP_ATTN_BWD) s->gradient = te_tensor_retain(((const te_op_attn_bwd_args *)event->args)->dq);
    if (event->op != TE_OP_QKV_ROPE && event->op != TE_OP_QKV_ROPE_BWD) return;
    if (!rotated) s->splits++;
    else if (te_tensor_data(rotated) == te_tensor_data(event->op == TE_OP_QKV_ROPE ? f->qkv : b->qkv)) s->in_place++;
    else s->elsewhere++;
}

enum { RESULTS = 12 };
typedef struct packed_run {
    float *got[RESULTS];
    int64_t n[RESULTS];
} packed_run;
static void keep_result(packed_run *r, int i, const te_tensor *x) {
    if (!x) return;
    r->n[i] = te_tensor_numel(x);
    r->got[i] = test_read(x);
}
/* The output and all gradients of a call of m, whose operations s sees. */
static packed_run run_packed(te_ctx *te, te_module *m, const packed_case *c, seen *s) {
    static const char *const parameters[][2] = {{"qkv", "weight"}, {"qkv", "bias"}, {"qkv", "query_weight"}, {"qkv", "key_weight"}, {"qkv", "value_weight"}, {"query_layer", "weight"},
                                                {"key_value", "weight"}, {"proj", "weight"}};
    const bool thd = c->format == TE_THD;
    const int64_t b = c->b, shapes[3][3] = {{S, b, WIDE}, {b, S, WIDE}, {q_lengths[0] + q_lengths[1], WIDE}}, far[2][3] = {{S_KV, b, WIDE}, {b, S_KV, WIDE}};
    const te_rotary_desc rotary = {.base = 100, .rotary_percent = 0.5f};
    te_tensor *x = leaf(te, c->dtype, thd ? 2 : 3, shapes[c->format], 1), *encoder = c->cross ? leaf(te, c->dtype, 3, far[c->format == TE_BSHD], 2) : NULL, *y;
    te_forward_args args = {.input = x, .encoder_output = encoder, .rotary = c->rotary ? &rotary : NULL, .attention.core_attention_bias_type = c->bias};
    packed_run r;
    memset(&r, 0, sizeof r);
    if (thd) args.attention.cu_seqlens_q = starts(te, q_lengths, 0);
    te_module_zero_grad(m);
    te_seed(te, 5);
    te_set_trace(te, see, s);
    y = te_forward_with(m, &args);
    te_backward_from(y, test_tensor(te, c->dtype, te_tensor_ndim(y), te_tensor_shape(y), test_normal(te_tensor_numel(y), 7)));
    te_set_trace(te, NULL, NULL);
    keep_result(&r, 0, y);
    keep_result(&r, 1, te_tensor_grad(x));
    keep_result(&r, 2, encoder ? te_tensor_grad(encoder) : NULL);
    for (int i = 0; i < COUNT(parameters); i++) {
        te_module *child = te_module_find(m, parameters[i][0]);
        te_tensor *parameter = child ? te_module_parameter(child, parameters[i][1]) : NULL;
        keep_result(&r, 3 + i, parameter ? te_tensor_grad(parameter) : NULL);
    }
    return r;
}
static void same_runs(const packed_run *a, const packed_run *b) {
    static const char *const names[RESULTS] = {"out", "dx", "of the encoder", "qkv", "its bias", "query", "key", "value", "query_layer", "key_value", "proj"};
    for (int i = 0; i < RESULTS; i++) {
        CHECK(!a->got[i] == !b->got[i] && a->n[i] == b->n[i]);
        if (a->got[i] && b->got[i]) CHECK_BYTES(names[i], a->got[i], b->got[i], (size_t)a->n[i] * sizeof(float));
    }
}

TE_TEST_DEVICES(packed_attention_equals_apart) {
    for (int n = 0; n < COUNT(packed_cases); n++) {
        const packed_case *c = &packed_cases[n];
        te_module *m = make_packed(te, c), *core = te_module_find(m, "core_attention");
        const bool rotates = c->rotary && !c->apart;
        seen packed = {0}, apart = {0}, kept = {.keep = true};
        packed_run a, b, d;
        test_case("%s", c->name);
        REQUIRE_OK(te);
        a = run_packed(te, m, c, &packed);
        kept.keep = rotates;
        b = run_packed(te, m, c, &kept);
        te_module_set_forward(core, foreign_core);
        d = run_packed(te, m, c, &apart);
        REQUIRE_OK(te);
        same_runs(&a, &d);
        same_runs(&a, &b);
        /* the core that is not te.h's gets q, k and v apart; te.h's neither splits nor copies, but gradients of three weights to each */
        CHECK(apart.splits + apart.copies >= 2 && apart.in_place + apart.elsewhere == 0);
        if (!c->apart) CHECK(packed.splits == 0 && (packed.copies == 0 || c->not_fused) && packed.in_place == (rotates ? 2 : 0) && packed.elsewhere == 0);
        /* memory that somebody looks at is not written again */
        if (rotates) {
            CHECK(kept.kept && kept.gradient && kept.elsewhere == 2 && kept.in_place == 0);
            te_tensor_release(kept.kept);
            te_tensor_release(kept.gradient);
        }
        te_module_destroy(m);
    }
}

/* A call of the core with grouped heads in one tensor is that with each by itself, in place or not, and where a call runs again. */
TE_TEST_DEVICES(packed_attention_of_grouped_heads) {
    enum { HEADS = 6, GROUPS = 2, IN_GROUP = HEADS / GROUPS };
    for (int n = 0; n < 2 * 2 * 3; n++) {
        const bool behind = n & 1, again = n & 2;
        const te_attn_mask mask = n / 4 == 0 ? TE_MASK_CAUSAL : n / 4 == 1 ? TE_MASK_NONE : TE_MASK_PADDING;
        te_dot_product_attention_desc d = {.attention.num_attention_heads = HEADS, .attention.num_gqa_groups = GROUPS, .attention.kv_channels = HEAD, .attention.attn_mask_type = mask};
        te_module *m = te_dot_product_attention_create(te, &d);
        const int64_t by_group[] = {S, B, GROUPS, IN_GROUP + 2, HEAD}, in_a_row[] = {S, B, HEADS + 2 * GROUPS, HEAD}, sizes[3] = {HEADS, GROUPS, GROUPS};
        float *x = test_normal(S * B * (HEADS + 2 * GROUPS) * HEAD, 1), *got[2], *grad, *want_grad = test_floats(S * B * (HEADS + 2 * GROUPS) * HEAD);
        te_forward_args args = {.attention.qkv_interleave_dim = behind ? -2 : -3, .attention.checkpoint_core_attention = again}, apart = {0};
        te_tensor *part[3], *y;
        test_case("%s, mask %d%s", behind ? "by groups" : "in a row", (int)mask, again ? ", run again" : "");
        args.attention.qkv_layer = te_tensor_set_requires_grad(behind ? test_tensor(te, TE_F32, 5, by_group, x) : test_tensor(te, TE_F32, 4, in_a_row, x), true);
        if (mask == TE_MASK_PADDING) args.attention.cu_seqlens_q = apart.attention.cu_seqlens_q = starts(te, q_lengths, 0);
        for (int i = 0; i < 3; i++) {
            float *one = test_floats(S * B * sizes[i] * HEAD);
            for (int64_t row = 0; row < S * B; row++)
                for (int64_t h = 0; h < sizes[i]; h++) {
                    const int64_t place = behind ? (i ? h * (IN_GROUP + 2) + IN_GROUP + i - 1 : h / IN_GROUP * (IN_GROUP + 2) + h % IN_GROUP) : (i ? HEADS + (i - 1) * GROUPS : 0) + h;
                    memcpy(one + (row * sizes[i] + h) * HEAD, x + (row * (HEADS + 2 * GROUPS) + place) * HEAD, HEAD * sizeof(float));
                }
            part[i] = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(S, B, sizes[i], HEAD), one), true);
        }
        apart.input = part[0], apart.key = part[1], apart.value = part[2];
        for (int i = 0; i < 2; i++) {
            y = te_forward_with(m, i ? &apart : &args);
            te_backward_from(y, test_tensor(te, TE_F32, SHAPE(S, B, HEADS * HEAD), test_normal(S * B * HEADS * HEAD, 3)));
            REQUIRE_OK(te);
            got[i] = test_read(y);
        }
        CHECK_BYTES("out", got[0], got[1], S * B * HEADS * HEAD * sizeof(float));
        grad = test_read(te_tensor_grad(args.attention.qkv_layer));
        for (int i = 0; i < 3; i++) {
            const float *one = test_read(te_tensor_grad(part[i]));
            for (int64_t row = 0; row < S * B; row++)
                for (int64_t h = 0; h < sizes[i]; h++) {
                    const int64_t place = behind ? (i ? h * (IN_GROUP + 2) + IN_GROUP + i - 1 : h / IN_GROUP * (IN_GROUP + 2) + h % IN_GROUP) : (i ? HEADS + (i - 1) * GROUPS : 0) + h;
                    memcpy(want_grad + (row * (HEADS + 2 * GROUPS) + place) * HEAD, one + (row * sizes[i] + h) * HEAD, HEAD * sizeof(float));
                }
        }
        CHECK_BYTES("gradient", grad, want_grad, S * B * (HEADS + 2 * GROUPS) * HEAD * sizeof(float));
        te_module_destroy(m);
    }
}
