/* Attention's and the layer's options: cross attention, norms of heads, parameters that are not fused, a rotation of keys' own, residuals and dropped paths: against the same
 * made of functions, one by one. */
#include "../te_test.h"

enum { S = 6, S_KV = 9, B = 2, H = 4, G = 2, D = 8, WIDE = 24, FFN = 40 };

/* ---- by hand ---- */

static te_tensor *param(te_module *m, const char *child, const char *name) { return te_module_parameter(*child ? te_module_find(m, child) : m, name); }
static te_tensor *project(te_module *m, const char *child, te_tensor *x) {
    te_module *c = te_module_find(m, child);
    static const char *const parts[3] = {"query", "key", "value"};
    te_tensor *out = NULL;
    int64_t at = 0, rows = 0, shape[3];
    char name[32];
    if (te_module_parameter(c, "weight")) return te_linear(x, te_module_parameter(c, "weight"), te_module_parameter(c, "bias"));
    for (int i = 0; i < 3; i++) { /* one product for each parameter */
        snprintf(name, sizeof name, "%s_weight", parts[i]);
        if (te_module_parameter(c, name)) rows += te_tensor_shape(te_module_parameter(c, name))[0];
    }
    shape[0] = te_tensor_shape(x)[0], shape[1] = te_tensor_shape(x)[1], shape[2] = rows;
    out = te_tensor_empty(te_tensor_ctx(x), te_tensor_dtype(x), 3, shape);
    for (int i = 0; i < 3; i++) {
        te_tensor *w, *b;
        snprintf(name, sizeof name, "%s_weight", parts[i]);
        w = te_module_parameter(c, name);
        snprintf(name, sizeof name, "%s_bias", parts[i]);
        b = te_module_parameter(c, name);
        if (!w) continue;
        te_tensor_copy(te_tensor_narrow(out, 2, at, te_tensor_shape(w)[0]), te_linear(x, w, b));
        at += te_tensor_shape(w)[0];
    }
    return out;
}
/* `count` heads out of x [s, b, all * D], head i being number first + i * step. */
static te_tensor *heads(te_tensor *x, int count, const int *which) {
    const int64_t *s = te_tensor_shape(x);
    te_tensor *y = te_tensor_empty(te_tensor_ctx(x), te_tensor_dtype(x), SHAPE(s[0], s[1], count, D));
    x = te_tensor_view(x, 4, (const int64_t[]){s[0], s[1], s[2] / D, D});
    for (int i = 0; i < count; i++) te_tensor_copy(te_tensor_narrow(y, 2, i, 1), te_tensor_narrow(x, 2, which[i], 1));
    return y;
}
static te_tensor *norm(te_tensor *x, te_tensor *w, te_tensor *b, float eps) { return b ? te_layernorm(x, w, b, eps, false) : te_rmsnorm(x, w, eps, false); }

typedef struct hand {
    const te_multihead_attention_desc *d;
    const te_rotary_desc *rotary, *rotary_key;
} hand;
static te_tensor *attention_by_hand(te_module *m, const hand *a, te_tensor *x, te_tensor *encoder, te_tensor **ln_out) {
    const te_attn_options *o = &a->d->attention;
    bool cross = o->attention_type == TE_ATTENTION_CROSS, interleaved = !o->no_qkv_weight_interleaved && !o->no_fuse_qkv_params;
    const char *first = a->d->input_layernorm ? cross ? "layernorm_query" : "layernorm_qkv" : cross ? "query_layer" : "qkv";
    te_tensor *part[3], *q, *kv;
    int which[3][H], r = H / G;
    if (a->d->input_layernorm) x = *ln_out = norm(x, param(m, first, "layer_norm_weight"), param(m, first, "layer_norm_bias"), 1e-5f);
    q = project(m, first, x);
    kv = cross ? project(m, "key_value", encoder) : q;
    for (int i = 0; i < H; i++) which[0][i] = cross || !interleaved ? i : i / r * (r + 2) + i % r;
    for (int g = 0; g < G; g++) {
        which[1][g] = interleaved ? cross ? 2 * g : g * (r + 2) + r : (cross ? 0 : H) + g;
        which[2][g] = interleaved ? which[1][g] + 1 : which[1][g] + G;
    }
    part[0] = heads(q, H, which[0]), part[1] = heads(kv, G, which[1]), part[2] = heads(kv, G, which[2]);
    for (int i = 0; i < 2; i++) {
        const te_rotary_desc *rotary = i && a->rotary_key ? a->rotary_key : a->rotary;
        const char *name = i ? "k_norm" : "q_norm";
        for (int pass = 0; pass < 2; pass++) {
            if (o->qk_norm_type && pass == !o->qk_norm_before_rope)
                part[i] = norm(part[i], param(m, name, "weight"), param(m, name, "bias"), o->qk_norm_eps > 0 ? o->qk_norm_eps : 1e-6f);
            if (pass == 0 && rotary) part[i] = te_apply_rotary_pos_emb(part[i], rotary, TE_SBHD);
        }
    }
    te_attn_desc core = {.rule.mask = o->attn_mask_type};
    q = te_attention(part[0], part[1], part[2], &core);
    q = te_tensor_view(q, 3, (const int64_t[]){te_tensor_shape(q)[0], B, H * D});
    return te_linear(q, param(m, "proj", "weight"), param(m, "proj", "bias"));
}

static float *after(te_ctx *te, te_module *m, te_forward_args *args) {
    te_tensor *y = te_forward_with(m, args);
    CHECK_OK(te);
    return test_read(y);
}

static const te_rotary_desc turn = {0}, slower = {.base = 500.0f};

/* Sums of f32 in another order, through four products and a softmax. */
#define CHECK_HAND(got, want, n) CHECK_ERROR_BELOW("by hand", got, want, n, te_ctx_is_cuda(te) ? 4e-3 : 2e-5)

TE_TEST_DEVICES(decoder_attention_by_hand) {
    for (int k = 0; k < 96; k++) {
        te_multihead_attention_desc d = {.hidden_size = WIDE, .attention.num_attention_heads = H, .attention.num_gqa_groups = G, .attention.kv_channels = D, .gemm.params_dtype = TE_F32};
        hand a = {&d, k & 1 ? &turn : NULL, (k & 3) == 3 ? &slower : NULL};
        te_forward_args args = {.rotary = a.rotary, .rotary_key = a.rotary_key};
        te_tensor *ln = NULL;
        d.attention.attention_type = k & 4 ? TE_ATTENTION_CROSS : TE_ATTENTION_SELF;
        d.attention.attn_mask_type = k & 4 ? TE_MASK_NONE : TE_MASK_CAUSAL;
        d.attention.no_fuse_qkv_params = k & 8;
        d.attention.no_qkv_weight_interleaved = (k & 24) == 16;
        d.attention.qk_norm_type = k / 32 == 0 ? TE_QK_NORM_NONE : k / 32 == 1 ? TE_QK_NORM_RMSNORM : TE_QK_NORM_LAYERNORM;
        d.attention.qk_norm_before_rope = k & 16;
        d.attention.qk_norm_eps = k & 2 ? 1e-3f : 0;
        d.input_layernorm = k & 1;
        te_seed(te, 7);
        te_module *m = te_multihead_attention_create(te, &d);
        REQUIRE_OK(te);
        test_case("attention %d", k);
        args.input = te_tensor_normal(te, TE_F32, SHAPE(S, B, WIDE), 0, 1);
        args.encoder_output = te_tensor_normal(te, TE_F32, SHAPE(S_KV, B, WIDE), 0, 1);
        float *got = after(te, m, &args);
        te_no_grad_begin(te); /* copies into parts are not recorded */
        float *want = test_read(attention_by_hand(m, &a, args.input, args.encoder_output, &ln));
        te_no_grad_end(te);
        CHECK_OK(te);
        CHECK_HAND(got, want, S * B * WIDE);
        te_module_destroy(m);
    }
}

static te_tensor *run_decoder(te_ctx *te, te_tensor *const *inputs, void *user) {
    te_forward_args args = {.input = inputs[0], .encoder_output = inputs[1], .rotary = &turn, .rotary_key = &slower};
    (void)te;
    return te_forward_with((te_module *)user, &args);
}
static te_tensor *run_self(te_ctx *te, te_tensor *const *inputs, void *user) {
    te_forward_args args = {.input = inputs[0], .rotary = &turn, .rotary_key = &slower};
    (void)te;
    return te_forward_with((te_module *)user, &args);
}
static bool gather_parameters(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te_tensor ***at = (te_tensor ***)user;
    (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER) *(*at)++ = x;
    return true;
}
TE_TEST(decoder_gradients_by_differences) {
    te_ctx *te = test_context("cpu");
    for (int k = 0; k < 4; k++) {
        te_multihead_attention_desc d = {.hidden_size = WIDE, .attention.num_attention_heads = H, .attention.num_gqa_groups = G, .attention.kv_channels = D, .gemm.params_dtype = TE_F32,
                                         .gemm.init.std = 0.3f, .output_layer_init.std = 0.3f, .input_layernorm = true};
        te_tensor *inputs[32], **end = inputs + 1 + k % 2;
        d.attention.attention_type = k & 1 ? TE_ATTENTION_CROSS : TE_ATTENTION_SELF;
        d.attention.no_fuse_qkv_params = k & 1;
        d.attention.qk_norm_type = k & 2 ? TE_QK_NORM_LAYERNORM : TE_QK_NORM_RMSNORM;
        d.attention.qk_norm_before_rope = k & 2;
        te_module *m = te_multihead_attention_create(te, &d);
        inputs[0] = te_tensor_normal(te, TE_F32, SHAPE(3, 1, WIDE), 0, 1);
        if (k & 1) inputs[1] = te_tensor_normal(te, TE_F32, SHAPE(4, 1, WIDE), 0, 1);
        te_module_visit_tensors(m, gather_parameters, &end);
        test_case("attention %d", k);
        test_check_gradients(te, k & 1 ? run_decoder : run_self, (int)(end - inputs), inputs, m, 2e-2, 5e-3); /* what differences in f32 are good for */
        te_module_destroy(m);
    }
}

TE_TEST_DEVICES(decoder_layer_by_hand) {
    for (int k = 0; k < 16; k++) {
        te_transformer_layer_desc d = {.hidden_size = WIDE, .ffn_hidden_size = FFN, .attention.num_attention_heads = H, .attention.num_gqa_groups = G, .attention.kv_channels = D,
                                       .gemm.params_dtype = TE_F32, .norm.normalization = TE_RMSNORM, .attention.attn_mask_type = TE_MASK_CAUSAL};
        bool decoder = k & 1, post = k & 2, end = k & 4, side = k & 8;
        if (side && (decoder || post || end)) continue; /* refused */
        d.layer_type = decoder ? TE_LAYER_DECODER : TE_LAYER_ENCODER;
        d.apply_residual_connection_post_layernorm = post;
        d.output_layernorm = end;
        d.parallel_attention_mlp = side;
        test_case("layer %d", k);
        te_seed(te, 8);
        te_module *m = te_transformer_layer_create(te, &d);
        REQUIRE_OK(te);
        te_forward_args args = {.input = te_tensor_normal(te, TE_F32, SHAPE(S, B, WIDE), 0, 1), .encoder_output = te_tensor_normal(te, TE_F32, SHAPE(S_KV, B, WIDE), 0, 1)};
        float *got = after(te, m, &args);
        te_no_grad_begin(te);
        te_multihead_attention_desc self = {.attention = d.attention, .input_layernorm = !end}, inter = {.attention = d.attention, .input_layernorm = true};
        inter.attention.attention_type = TE_ATTENTION_CROSS, inter.attention.attn_mask_type = TE_MASK_NONE;
        hand a = {&self, NULL, NULL}, c = {&inter, NULL, NULL};
        te_tensor *x = args.input, *ln = NULL, *y = attention_by_hand(te_module_find(m, "self_attention"), &a, x, NULL, &ln), *h = x, *z;
        te_module *mlp = te_module_find(m, "layernorm_mlp");
        if (!side) h = te_add(y, post && !end ? ln : x);
        if (decoder) {
            z = attention_by_hand(te_module_find(m, "inter_attention"), &c, h, args.encoder_output, &ln);
            h = te_add(z, post ? ln : h);
        }
        ln = te_rmsnorm(h, param(mlp, "", "layer_norm_weight"), 1e-5f, false);
        z = te_linear(te_activate(te_linear(ln, param(mlp, "", "fc1_weight"), param(mlp, "", "fc1_bias")), TE_GELU, NULL), param(mlp, "", "fc2_weight"), param(mlp, "", "fc2_bias"));
        z = side ? te_add(x, te_add(y, z)) : te_add(z, post ? ln : h);
        if (end) z = te_rmsnorm(z, param(m, "layernorm", "weight"), 1e-5f, false);
        te_no_grad_end(te);
        CHECK_OK(te);
        CHECK_HAND(got, test_read(z), S * B * WIDE);
        te_module_destroy(m);
    }
}

TE_TEST_DEVICES(decoder_mask_and_window_of_a_call) {
    te_transformer_layer_desc d = {.hidden_size = WIDE, .ffn_hidden_size = FFN, .attention.num_attention_heads = H, .gemm.params_dtype = TE_F32, .layer_type = TE_LAYER_DECODER};
    te_seed(te, 3);
    te_module *m = te_transformer_layer_create(te, &d);
    te_forward_args args = {.input = te_tensor_normal(te, TE_F32, SHAPE(S, B, WIDE), 0, 1), .encoder_output = te_tensor_normal(te, TE_F32, SHAPE(S, B, WIDE), 0, 1)};
    float *all = after(te, m, &args);
    args.cross.enc_dec_attn_mask_type = TE_MASK_CAUSAL;
    float *causal = after(te, m, &args);
    args.cross.enc_dec_attn_mask_type = TE_MASK_NONE;
    CHECK_BYTES("the default is no mask", after(te, m, &args), all, S * B * WIDE * 4);
    d.enc_dec_attn_mask_type = TE_MASK_CAUSAL;
    te_seed(te, 3);
    te_module *own = te_transformer_layer_create(te, &d);
    args.cross.enc_dec_attn_mask_type = TE_MASK_DEFAULT;
    CHECK_BYTES("the module's own", after(te, own, &args), causal, S * B * WIDE * 4);
    CHECK(memcmp(all, causal, S * B * WIDE * 4) != 0);
    d.enc_dec_window.on = true, d.enc_dec_window.left = 1;
    te_seed(te, 3);
    te_module *near = te_transformer_layer_create(te, &d);
    float *windowed = after(te, near, &args);
    CHECK(memcmp(windowed, causal, S * B * WIDE * 4) != 0);
    args.cross.enc_dec_window = d.enc_dec_window;
    CHECK_BYTES("the window of the call", after(te, own, &args), windowed, S * B * WIDE * 4);
    te_module_destroy(m), te_module_destroy(own), te_module_destroy(near);
}

/* ---- dropped paths ---- */

TE_TEST_DEVICES(decoder_drop_path) {
    enum { MANY = 2000, N = 24 };
    float p = 0.3f, *x = test_normal(MANY * N, 1), *r = test_normal(MANY * N, 2);
    for (int odd = 0; odd < 2; odd++) { /* runs of whole vectors, and not */
        int n = N - odd, kept = 0;
        te_seed(te, 5);
        te_tensor *a = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(MANY, n), x), true), *b = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(MANY, n), r), true);
        te_tensor *y = te_drop_path(a, b, p), *dy = test_tensor(te, TE_F32, SHAPE(MANY, n), r);
        te_backward_from(y, dy);
        REQUIRE_OK(te);
        float *got = test_read(y), *da = test_read(te_tensor_grad(a)), *db = test_read(te_tensor_grad(b));
        for (int i = 0; i < MANY; i++) {
            float scale = da[i * n] != 0.0f ? 1.0f / (1.0f - p) : 0.0f;
            kept += scale != 0.0f;
            for (int k = i * n; k < (i + 1) * n; k++) {
                CHECK(got[k] == r[k] + x[k] * scale && da[k] == r[k] * scale && db[k] == r[k]);
            }
        }
        CHECK(kept > MANY * 0.66 && kept < MANY * 0.74); /* four standard deviations of 0.01 */
    }
}
TE_TEST_DEVICES(decoder_drop_path_of_a_layer) {
    te_transformer_layer_desc d = {.hidden_size = WIDE, .ffn_hidden_size = FFN, .attention.num_attention_heads = H, .gemm.params_dtype = TE_F32, .drop_path_rate = 0.5f, .hidden_dropout = 0.1f};
    te_module *m = te_transformer_layer_create(te, &d);
    float *grad[2], *out[2];
    int untouched = 0;
    for (int again = 0; again < 2; again++) { /* the same paths when the forward runs again */
        te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(64, 1, WIDE), test_normal(64 * WIDE, 3)), true);
        te_module_set_checkpoint(m, again);
        te_seed(te, 9);
        te_tensor *y = te_forward(m, x);
        te_backward_from(y, x);
        REQUIRE_OK(te);
        grad[again] = test_read(te_tensor_grad(x));
        out[again] = test_read(y);
        for (int i = 0; i < 64 && !again; i++) untouched += memcmp(out[0] + i * WIDE, test_normal(64 * WIDE, 3) + i * WIDE, WIDE * 4) == 0;
    }
    CHECK_BYTES("output", out[1], out[0], 64 * WIDE * 4);
    CHECK_BYTES("gradient", grad[1], grad[0], 64 * WIDE * 4);
    CHECK(untouched > 4 && untouched < 32); /* a quarter of 64 skip both halves: three and a half standard deviations */
    te_module_train(m, false);
    te_module_set_checkpoint(m, false);
    te_forward_args args = {.input = te_tensor_normal(te, TE_F32, SHAPE(8, 1, WIDE), 0, 1)};
    float *once = after(te, m, &args);
    CHECK_BYTES("evaluation", after(te, m, &args), once, 8 * WIDE * 4);
    te_module_destroy(m);
}

TE_TEST(decoder_refusals) {
    te_ctx *te = test_context("cpu");
    te_transformer_layer_desc d = {.hidden_size = WIDE, .ffn_hidden_size = FFN, .attention.num_attention_heads = H, .layer_type = TE_LAYER_DECODER};
    te_module *m = te_transformer_layer_create(te, &d);
    CHECK(!te_forward(m, te_tensor_zeros(te, TE_BF16, SHAPE(S, B, WIDE))));
    CHECK_ERROR(te, TE_ERR_INVALID, "encoder_output is NULL");
    te_module_destroy(m);
    d.parallel_attention_mlp = true;
    CHECK(!te_transformer_layer_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "parallel_attention_mlp");
    d.parallel_attention_mlp = false, d.layer_type = TE_LAYER_ENCODER, d.enc_dec_attn_mask_type = TE_MASK_CAUSAL;
    CHECK(!te_transformer_layer_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "enc_dec_attn_mask_type");
    d.enc_dec_attn_mask_type = TE_MASK_NONE, d.enc_dec_window = (te_window){true, 3, -1};
    CHECK(!te_transformer_layer_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "leave them at their defaults");
    d.enc_dec_window = (te_window){true, -1, -1}; /* the defaults, written down */
    m = te_transformer_layer_create(te, &d);
    REQUIRE(m != NULL);
    CHECK(te_forward(m, te_tensor_zeros(te, TE_BF16, SHAPE(S, B, WIDE))) != NULL);
    te_module_destroy(m);
    CHECK_OK(te);
    d.enc_dec_attn_mask_type = TE_MASK_DEFAULT, d.enc_dec_window.on = false, d.drop_path_rate = 1.0f;
    CHECK(!te_transformer_layer_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "drop_path_rate 1");
    d.drop_path_rate = 0, d.attention.attention_type = TE_ATTENTION_CROSS;
    CHECK(!te_transformer_layer_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "attention.attention_type 1");
    d.attention.attention_type = TE_ATTENTION_SELF, d.attention.qk_norm_type = (te_qk_norm)4;
    CHECK(!te_transformer_layer_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "qk_norm_type 4");
}
