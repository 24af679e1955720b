/* export_onnx.c: every module of te.h as an ONNX file, and what te.h computes with it at other batches and lengths: for check_onnx.py.
 *
 *     build/export_onnx FOLDER [WORD ...]     cases whose names contain a word; none: all
 *
 * Each case writes NAME.onnx, and NAME.1.safetensors and NAME.2.safetensors with `in.FIELD` and `out.FIELD` in f32, integers as they are. Public API alone. */
#include "te.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { H = 64, F = 96, HEADS = 4, D = 16, VOCAB = 40, MOST = 16 };

typedef enum kind {
    LINEAR,
    NORM,
    BACKEND, /* a norm and a Linear by their backends */
    LN_LINEAR,
    MLP,
    EMBEDDING,
    CORE,
    ATTENTION,
    LAYER,
    SEQUENTIAL,
    SMALL, /* a Sequential of the small modules, some of which run as one with a Linear */
    GROUPED,
    LM,
    OWN_ATTENTION, /* a class of this file's, on te_attention */
    OWN_SOFTMAX,   /* one on the softmaxes of scores */
    OWN_EXPERTS,   /* and one on the functions of mixtures of experts */
    OWN_FACTORS    /* one on factors of rows */
} kind;

/* One case: a module, and how it is called. Zero is the default. */
typedef struct scene {
    const char *name;
    kind kind;
    te_activation activation;
    te_normalization norm;
    te_attn_mask mask;
    te_window window;
    int groups;          /* of keys; 0 => HEADS */
    te_qkv_format format;
    bool zero_centered, return_bias, return_ln, rotary, starts, cross, split, no_bias, arbitrary_mask, post_norm_residual, output_norm, parallel_mlp, llama3, caps, tied;
    te_qk_norm qk_norm;
    te_rotary_desc turn; /* with rotary */
    te_attn_bias bias;   /* of OWN_ATTENTION */
    te_softmax_type softmax;
    bool slopes;
    te_fused_topk_desc router; /* of OWN_EXPERTS */
    bool index_map;
    bool positions; /* of each token, with rotary */
    int freqs; /* a table of angles, with rotary; 1: a row for each token of each sequence, 2: of 50 positions */
    bool padding, enc_dec_padding; /* masks of the padding behind each sequence, of the encoder's output */
    bool max_logit, packed;        /* of CORE */
    bool interleaved; /* of SMALL: halves by blocks */
    bool one;         /* exported with one sequence */
    int head_channels; /* of ATTENTION; 0 => D */
    bool alias;       /* exported with one tensor as two inputs: keys and values, the starts of queries and keys */
    bool key_turn;    /* keys are rotated by starts or positions of their own, with rotary */
    bool unused_rows; /* of GROUPED: behind the last group */
    te_rms_norm_backend rms_norm; /* of BACKEND */
    te_attn_backend backend; /* of CORE; 0 => DotProductAttention */
} scene;

static const scene scenes[] = {
    {.name = "linear", .kind = LINEAR},
    {.name = "linear_split", .kind = LINEAR, .split = true},
    {.name = "linear_return_bias", .kind = LINEAR, .return_bias = true},
    {.name = "layernorm", .kind = NORM, .zero_centered = true},
    {.name = "rmsnorm", .kind = NORM, .norm = TE_RMSNORM},
    {.name = "torch_backends", .kind = BACKEND, .rms_norm = TE_RMS_NORM_TORCH},
    {.name = "torch_fp32_backends", .kind = BACKEND, .rms_norm = TE_RMS_NORM_TORCH_FP32},
    {.name = "layernorm_linear", .kind = LN_LINEAR, .return_ln = true},
    {.name = "rmsnorm_linear", .kind = LN_LINEAR, .norm = TE_RMSNORM, .zero_centered = true, .return_bias = true},
    {.name = "mlp_gelu", .kind = MLP},
    {.name = "mlp_relu", .kind = MLP, .activation = TE_RELU},
    {.name = "mlp_silu", .kind = MLP, .activation = TE_SILU},
    {.name = "mlp_qgelu", .kind = MLP, .activation = TE_QGELU},
    {.name = "mlp_srelu", .kind = MLP, .activation = TE_SRELU},
    {.name = "mlp_geglu", .kind = MLP, .activation = TE_GEGLU},
    {.name = "mlp_reglu", .kind = MLP, .activation = TE_REGLU, .return_bias = true},
    {.name = "mlp_swiglu", .kind = MLP, .activation = TE_SWIGLU, .norm = TE_RMSNORM, .return_ln = true},
    {.name = "mlp_qgeglu", .kind = MLP, .activation = TE_QGEGLU},
    {.name = "mlp_sreglu", .kind = MLP, .activation = TE_SREGLU},
    {.name = "mlp_glu", .kind = MLP, .activation = TE_GLU},
    {.name = "mlp_clamped", .kind = MLP, .activation = TE_CLAMPED_SWIGLU},
    {.name = "embedding", .kind = EMBEDDING},
    {.name = "core_causal", .kind = CORE},
    {.name = "core_none_gqa", .kind = CORE, .mask = TE_MASK_NONE, .groups = 2},
    {.name = "core_bottom_right_bshd", .kind = CORE, .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT, .groups = 1, .format = TE_BSHD},
    {.name = "core_eager", .kind = CORE, .mask = TE_MASK_NONE, .groups = 2, .format = TE_BSHD, .backend = TE_ATTN_EAGER},
    {.name = "core_window", .kind = CORE, .window = {true, 5, 0}},
    {.name = "core_window_none", .kind = CORE, .mask = TE_MASK_NONE, .window = {true, 3, 4}, .format = TE_BSHD},
    {.name = "attention", .kind = ATTENTION},
    {.name = "attention_rotary", .kind = ATTENTION, .rotary = true, .groups = 2, .turn = {.rotary_percent = 0.5f, .interleaved = true, .position_offset = 3}},
    {.name = "attention_starts", .kind = ATTENTION, .rotary = true, .starts = true, .format = TE_BSHD, .turn = {.seq_len_interpolation_factor = 2}},
    {.name = "attention_yarn", .kind = ATTENTION, .rotary = true, .positions = true, .turn.scaling = {.type = TE_ROPE_YARN, .factor = 4, .original_max_position_embeddings = 32}},
    {.name = "attention_positions_one", .kind = ATTENTION, .rotary = true, .positions = true, .key_turn = true, .one = true},
    {.name = "attention_mrope", .kind = ATTENTION, .rotary = true, .freqs = 1, .groups = 2, .turn = {.interleaved = true, .attention_factor = 1.25f}},
    {.name = "attention_mrope_bshd", .kind = ATTENTION, .rotary = true, .freqs = 1, .key_turn = true, .format = TE_BSHD},
    {.name = "attention_table", .kind = ATTENTION, .rotary = true, .positions = true, .freqs = 2},
    {.name = "attention_starts_alias", .kind = ATTENTION, .rotary = true, .starts = true, .key_turn = true, .alias = true},
    {.name = "attention_wide", .kind = ATTENTION, .rotary = true, .groups = 2, .head_channels = 320},
    {.name = "attention_qk_norm", .kind = ATTENTION, .rotary = true, .qk_norm = TE_QK_NORM_RMSNORM, .no_bias = true},
    {.name = "attention_cross", .kind = ATTENTION, .cross = true, .mask = TE_MASK_NONE, .groups = 2},
    {.name = "layer", .kind = LAYER},
    {.name = "layer_llama", .kind = LAYER, .norm = TE_RMSNORM, .activation = TE_SWIGLU, .rotary = true, .groups = 2, .no_bias = true, .format = TE_BSHD},
    {.name = "layer_decoder", .kind = LAYER, .cross = true},
    {.name = "layer_post", .kind = LAYER, .post_norm_residual = true, .output_norm = true},
    {.name = "layer_parallel", .kind = LAYER, .parallel_mlp = true, .window = {true, 4, 0}},
    {.name = "sequential", .kind = SEQUENTIAL},
    {.name = "core_padding", .kind = CORE, .mask = TE_MASK_PADDING, .padding = true},
    {.name = "core_padding_one", .kind = CORE, .mask = TE_MASK_PADDING, .padding = true, .one = true},
    {.name = "core_alias", .kind = CORE, .mask = TE_MASK_NONE, .alias = true},
    {.name = "core_padding_corner", .kind = CORE, .mask = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT, .padding = true, .window = {true, 4, 1}, .groups = 2, .format = TE_BSHD},
    {.name = "core_learnable", .kind = CORE, .softmax = TE_SOFTMAX_LEARNABLE, .max_logit = true},
    {.name = "core_packed", .kind = CORE, .packed = true},
    {.name = "attention_padding", .kind = ATTENTION, .mask = TE_MASK_PADDING_CAUSAL, .padding = true, .rotary = true},
    {.name = "attention_qk_l2", .kind = ATTENTION, .qk_norm = TE_QK_NORM_L2},
    {.name = "layer_padding", .kind = LAYER, .mask = TE_MASK_PADDING, .padding = true},
    {.name = "layer_decoder_padding", .kind = LAYER, .cross = true, .enc_dec_padding = true},
    {.name = "small_gelu", .kind = SMALL},
    {.name = "small_swiglu", .kind = SMALL, .activation = TE_SWIGLU},
    {.name = "small_interleaved", .kind = SMALL, .activation = TE_GEGLU, .interleaved = true},
    {.name = "grouped", .kind = GROUPED},
    {.name = "grouped_unused_rows", .kind = GROUPED, .unused_rows = true},
    {.name = "lm", .kind = LM, .groups = 2},
    {.name = "lm_tied", .kind = LM, .tied = true, .groups = 1, .qk_norm = TE_QK_NORM_RMSNORM, .window = {true, 6, 0}, .llama3 = true},
    {.name = "lm_caps", .kind = LM, .groups = 2, .caps = true, .window = {true, 6, 0}},
    {.name = "own_alibi", .kind = OWN_ATTENTION, .bias = TE_ATTN_BIAS_ALIBI, .format = TE_BSHD},
    {.name = "own_slopes", .kind = OWN_ATTENTION, .bias = TE_ATTN_BIAS_ALIBI, .slopes = true, .mask = TE_MASK_NONE},
    {.name = "own_pre_bias", .kind = OWN_ATTENTION, .bias = TE_ATTN_BIAS_PRE_SCALE, .groups = 2},
    {.name = "own_post_bias", .kind = OWN_ATTENTION, .bias = TE_ATTN_BIAS_POST_SCALE, .mask = TE_MASK_CAUSAL_BOTTOM_RIGHT},
    {.name = "own_arbitrary", .kind = OWN_ATTENTION, .mask = TE_MASK_ARBITRARY, .arbitrary_mask = true},
    {.name = "own_off_by_one", .kind = OWN_ATTENTION, .softmax = TE_SOFTMAX_OFF_BY_ONE, .window = {true, 4, 0}},
    {.name = "own_learnable", .kind = OWN_ATTENTION, .softmax = TE_SOFTMAX_LEARNABLE, .mask = TE_MASK_NONE, .format = TE_BSHD},
    {.name = "own_softmax_masked", .kind = OWN_SOFTMAX},
    {.name = "own_experts", .kind = OWN_EXPERTS, .router.topk = 2},
    {.name = "own_experts_pre", .kind = OWN_EXPERTS, .router = {.topk = 2, .use_pre_softmax = true, .scaling_factor = 1.5f}},
    {.name = "own_experts_sigmoid", .kind = OWN_EXPERTS, .router = {.topk = 4, .score_function = TE_SCORE_SIGMOID, .num_groups = 4, .group_topk = 2}},
    {.name = "own_experts_softplus", .kind = OWN_EXPERTS, .router = {.topk = 3, .score_function = TE_SCORE_SQRTSOFTPLUS}},
    {.name = "own_factors", .kind = OWN_FACTORS, .activation = TE_SWIGLU},
    {.name = "own_factors_plain", .kind = OWN_FACTORS, .activation = TE_SRELU},
    {.name = "own_factors_interleaved", .kind = OWN_FACTORS, .activation = TE_CLAMPED_SWIGLU, .interleaved = true},
    {.name = "own_experts_index", .kind = OWN_EXPERTS, .router.topk = 2, .index_map = true},
};

/* A format and a recipe under which scenes are exported. Those beyond the first three take the scenes with products alone. */
typedef struct mode {
    const char *name;
    te_dtype dtype;
    te_recipe_kind recipe; /* 0 => none */
    bool stored;           /* weights are stored quantized */
    bool plain;            /* and used outside of autocast: decoded */
    bool dpa;              /* FP8 attention, of scenes that have any */
} mode;
static const mode modes[] = {{"f32", TE_F32, TE_RECIPE_NONE, false, false, false},
                             {"bf16", TE_BF16, TE_RECIPE_NONE, false, false, false},
                             {"f16", TE_F16, TE_RECIPE_NONE, false, false, false},
                             {"delayed", TE_F32, TE_RECIPE_DELAYED, false, false, false},
                             {"delayed_bf16", TE_BF16, TE_RECIPE_DELAYED, false, false, false},
                             {"current", TE_F32, TE_RECIPE_CURRENT, false, false, false},
                             {"block", TE_BF16, TE_RECIPE_BLOCK, false, false, false},
                             {"mxfp8", TE_BF16, TE_RECIPE_MXFP8, false, false, false},
                             {"nvfp4", TE_BF16, TE_RECIPE_NVFP4, false, false, false},
                             {"stored_current", TE_F32, TE_RECIPE_CURRENT, true, false, false},
                             {"stored_mxfp8", TE_BF16, TE_RECIPE_MXFP8, true, false, false},
                             {"decoded_current", TE_BF16, TE_RECIPE_CURRENT, true, true, false},
                             {"decoded_block", TE_BF16, TE_RECIPE_BLOCK, true, true, false},
                             {"decoded_mxfp8", TE_BF16, TE_RECIPE_MXFP8, true, true, false},
                             {"decoded_nvfp4", TE_BF16, TE_RECIPE_NVFP4, true, true, false},
                             {"delayed_dpa", TE_F32, TE_RECIPE_DELAYED, false, false, true}};

static void check(te_ctx *te, const char *what) {
    if (te_error_code(te) == TE_OK) return;
    fprintf(stderr, "export_onnx: %s: %s\n", what, te_error(te));
    exit(1);
}

/* ---- modules ---- */

static te_recipe recipe_of(te_recipe_kind kind) {
    switch (kind) {
    case TE_RECIPE_CURRENT: return te_recipe_current_scaling();
    case TE_RECIPE_BLOCK: return te_recipe_block_scaling();
    case TE_RECIPE_MXFP8: return te_recipe_mxfp8();
    case TE_RECIPE_NVFP4: return te_recipe_nvfp4();
    default: return te_recipe_delayed_scaling();
    }
}

/* ---- classes of this file ---- */

enum { EXPERTS = 8 };
typedef struct own {
    const scene *s;
} own;

static te_result own_attention(te_module *m, te_forward_args *args) {
    const scene *s = ((own *)te_module_state(m))->s;
    te_attn_desc d = {.format = s->format, .rule.mask = s->mask, .rule.window = s->window};
    d.rule.core_attention_bias_type = s->bias;
    d.rule.core_attention_bias = args->attention.core_attention_bias;
    d.rule.alibi_slopes = args->attention.alibi_slopes;
    d.rule.attention_mask = args->attention.attention_mask;
    d.rule.softmax_type = s->softmax;
    d.rule.softmax_offset = s->softmax == TE_SOFTMAX_LEARNABLE ? te_module_parameter(m, "offset") : NULL;
    d.max_logit = te_tensor_empty(te_module_ctx(m), TE_F32, 1, (int64_t[]){HEADS});
    args->outputs.out = te_attention(args->input, args->key, args->value, &d);
    args->outputs.max_logit = d.max_logit;
    return te_error_code(te_module_ctx(m));
}
static const te_module_class own_attention_class = {.name = "OwnAttention", .state_size = sizeof(own), .forward = own_attention};

/* x [s, b, 4, 16] as scores. The second query's mask leaves it the last two keys, which its place in the sequence hides. */
static te_result own_softmax(te_module *m, te_forward_args *args) {
    te_ctx *te = te_module_ctx(m);
    te_tensor *x = args->input;
    uint8_t masked[HEADS * D] = {0};
    for (int i = D; i < 2 * D - 2; i++) masked[i] = 1;
    args->outputs.out = te_tensor_empty(te, te_tensor_dtype(x), te_tensor_ndim(x), te_tensor_shape(x));
    te_tensor *mask = te_tensor_from_host(te, TE_U8, 4, (int64_t[]){1, 1, HEADS, D}, masked);
    return te_op_softmax_fwd(te, &(te_op_softmax_fwd_args){.x = x, .y = args->outputs.out, .mask = mask, .causal = true});
}
static const te_module_class own_softmax_class = {.name = "OwnSoftmax", .state_size = sizeof(own), .forward = own_softmax};

static te_result own_factors(te_module *m, te_forward_args *args) {
    const scene *s = ((own *)te_module_state(m))->s;
    te_autocast_begin(te_module_ctx(m), &(te_autocast_desc){.disabled = true}); /* products of one column */
    te_tensor *factor = te_forward(te_module_child(m, 0), args->input);
    te_autocast_end(te_module_ctx(m));
    te_tensor *up = te_forward(te_module_child(m, 1), args->input);
    te_tensor *y = te_scaled_activate(up, factor, s->activation, &(te_activation_params){.glu_interleave_size = s->interleaved ? 16 : 0});
    args->outputs.out = te_mul(y, te_mul(factor, factor));
    return te_error_code(te_module_ctx(m));
}
static const te_module_class own_factors_class = {.name = "OwnFactors", .state_size = sizeof(own), .forward = own_factors};

static te_result own_experts(te_module *m, te_forward_args *args) {
    const scene *s = ((own *)te_module_state(m))->s;
    te_ctx *te = te_module_ctx(m);
    te_fused_topk_desc router = s->router;
    int64_t rows = te_tensor_shape(args->input)[0], topk = router.topk;
    te_tensor *map, *row_id_map, *counts = te_tensor_empty(te, TE_I64, 1, (int64_t[]){EXPERTS});
    router.topk_indices = te_tensor_empty(te, TE_I32, 2, (int64_t[]){rows, topk});
    te_autocast_begin(te, &(te_autocast_desc){.disabled = true}); /* an expert more or less is no matter of rounding */
    te_tensor *logits = te_forward(te_module_child(m, 0), args->input);
    te_autocast_end(te);
    te_tensor *probs = te_fused_topk_with_score_function(logits, &router, &map);
    te_tensor *in = te_moe_permute(args->input, s->index_map ? router.topk_indices : map, rows * topk, s->index_map ? TE_MAP_INDEX : TE_MAP_MASK, &row_id_map);
    te_op_moe_mask_map(te, &(te_op_moe_mask_map_args){.routing_map = map, .row_id_map = te_tensor_empty(te, TE_I32, 2, (int64_t[]){rows, 2 * EXPERTS + 1}), .tokens_per_expert = counts});
    te_forward_args up = {.input = in, .m_splits_tensor = counts}, down = {.m_splits_tensor = counts};
    down.input = te_activate(te_forward_with(te_module_child(m, 1), &up), TE_SWIGLU, NULL);
    te_tensor *y = te_forward_with(te_module_child(m, 2), &down);
    te_tensor *ones = s->index_map ? te_tensor_full(te, TE_F32, 2, (int64_t[]){rows, topk}, 0.5) : NULL;
    args->outputs.out = te_moe_unpermute(y, row_id_map, &(te_moe_unpermute_desc){.merging_probs = s->index_map ? ones : probs, .map_type = s->index_map ? TE_MAP_INDEX : TE_MAP_MASK});
    return te_error_code(te);
}
static const te_module_class own_experts_class = {.name = "OwnExperts", .state_size = sizeof(own), .forward = own_experts};

static te_module *make_own(te_ctx *te, const scene *s, const te_gemm_options *gemm) {
    const te_module_class *of = s->kind == OWN_ATTENTION ? &own_attention_class
                                : s->kind == OWN_SOFTMAX ? &own_softmax_class
                                : s->kind == OWN_FACTORS ? &own_factors_class
                                                         : &own_experts_class;
    te_module *m = te_module_create(te, of, s->name);
    ((own *)te_module_state(m))->s = s;
    if (s->softmax == TE_SOFTMAX_LEARNABLE) te_module_add_parameter(m, "offset", te_tensor_normal(te, TE_F32, 1, (int64_t[]){HEADS}, 0, 1));
    if (s->kind == OWN_FACTORS) {
        te_module_add_child(m, "factor", te_linear_create(te, &(te_linear_desc){.in_features = H, .out_features = 1, .gemm = *gemm}));
        te_module_add_child(m, "up", te_linear_create(te, &(te_linear_desc){.in_features = H, .out_features = te_activation_is_gated(s->activation) ? 2 * F : F, .gemm = *gemm}));
    }
    if (s->kind != OWN_EXPERTS) return m;
    te_module_add_child(m, "router", te_linear_create(te, &(te_linear_desc){.in_features = H, .out_features = EXPERTS, .gemm = *gemm}));
    te_module_add_child(m, "up", te_grouped_linear_create(te, &(te_grouped_linear_desc){.num_gemms = EXPERTS, .in_features = H, .out_features = 2 * F, .gemm = *gemm}));
    te_module_add_child(m, "down", te_grouped_linear_create(te, &(te_grouped_linear_desc){.num_gemms = EXPERTS, .in_features = F, .out_features = H, .gemm = *gemm}));
    return m;
}

static te_module *make(te_ctx *te, const scene *s, te_dtype dtype) {
    static const char *const names[] = {"left", "right"};
    te_norm_options norm = {.normalization = s->norm, .zero_centered_gamma = s->zero_centered};
    te_gemm_options gemm = {.no_bias = s->no_bias, .return_bias = s->return_bias, .params_dtype = dtype, .init.std = 0.1f};
    te_attn_options attention = {.num_attention_heads = HEADS, .num_gqa_groups = s->groups, .kv_channels = s->head_channels ? s->head_channels : D, .qkv_format = s->format, .attn_mask_type = s->mask, .window = s->window,
                                      .attention_type = s->cross && s->kind == ATTENTION ? TE_ATTENTION_CROSS : TE_ATTENTION_SELF, .qk_norm_type = s->qk_norm, .softmax_type = s->softmax,
                                      .return_max_logit = s->max_logit};
    switch (s->kind) {
    case LINEAR:
        return te_linear_create(te, &(te_linear_desc){.in_features = H, .out_features = F, .gemm = gemm, .parameters_split = {.names = names, .count = s->split ? 2 : 0}});
    case NORM: {
        te_norm_desc d = {.hidden_size = H, .norm = {.zero_centered_gamma = s->zero_centered}, .params_dtype = dtype};
        return s->norm == TE_RMSNORM ? te_rmsnorm_create(te, &d) : te_layernorm_create(te, &d);
    }
    case BACKEND: {
        te_module *list[2];
        list[0] = te_initialize_rms_norm_module(te, &(te_rms_norm_module_desc){.rms_norm_impl = s->rms_norm, .dim = H, .dtype = dtype});
        list[1] = te_initialize_linear_module(te, &(te_linear_module_desc){.linear_impl = TE_LINEAR_TORCH, .in_features = H, .out_features = F, .bias = true, .dtype = dtype});
        return te_sequential_create(te, list, 2);
    }
    case LN_LINEAR:
        return te_layernorm_linear_create(te, &(te_layernorm_linear_desc){.in_features = H, .out_features = F, .norm = norm, .gemm = gemm, .return_layernorm_output = s->return_ln});
    case MLP:
        return te_layernorm_mlp_create(te, &(te_layernorm_mlp_desc){.hidden_size = H, .ffn_hidden_size = F, .activation = s->activation, .norm = norm, .gemm = gemm,
                                                                    .output_layer_init.std = 0.1f, .return_layernorm_output = s->return_ln});
    case EMBEDDING: return te_embedding_create(te, &(te_embedding_desc){.num_embeddings = VOCAB, .embedding_dim = H, .params_dtype = dtype, .init.std = 1});
    case CORE:
        if (s->backend)
            return te_initialize_attn_module(te, s->backend, &(te_attn_module_desc){.num_attention_heads = HEADS, .num_gqa_groups = s->groups, .num_qk_channels = D, .softmax_scale = 0.3f,
                                                                                    .attn_mask_type = s->mask});
        return te_dot_product_attention_create(te, &(te_dot_product_attention_desc){.attention = attention});
    case ATTENTION:
        return te_multihead_attention_create(te, &(te_multihead_attention_desc){.hidden_size = H, .attention = attention, .norm = norm, .gemm = gemm, .output_layer_init.std = 0.1f});
    case LAYER:
        return te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = H, .ffn_hidden_size = F, .attention = attention, .norm = norm, .gemm = gemm,
                                                                            .output_layer_init.std = 0.1f, .activation = s->activation,
                                                                            .layer_type = s->cross ? TE_LAYER_DECODER : TE_LAYER_ENCODER,
                                                                            .enc_dec_attn_mask_type = s->enc_dec_padding ? TE_MASK_PADDING : TE_MASK_DEFAULT,
                                                                            .apply_residual_connection_post_layernorm = s->post_norm_residual, .output_layernorm = s->output_norm,
                                                                            .parallel_attention_mlp = s->parallel_mlp});
    case SEQUENTIAL: {
        te_module *list[2];
        list[0] = te_layernorm_linear_create(te, &(te_layernorm_linear_desc){.in_features = H, .out_features = F, .gemm = gemm});
        list[1] = te_linear_create(te, &(te_linear_desc){.in_features = F, .out_features = H, .gemm = gemm});
        return te_sequential_create(te, list, 2);
    }
    case SMALL: {
        te_module *list[9];
        list[0] = te_l2normalization_create(te, &(te_l2normalization_desc){0});
        list[1] = te_constant_scale_create(te, &(te_constant_scale_desc){.scale = 6});
        list[2] = te_rmsnorm_create(te, &(te_norm_desc){.hidden_size = H, .params_dtype = dtype});
        list[3] = te_linear_create(te, &(te_linear_desc){.in_features = H, .out_features = F, .gemm = gemm});
        list[4] = te_activation_create(te, &(te_activation_desc){.activation = s->activation, .activation_params.glu_interleave_size = s->interleaved ? F / 6 : 0});
        list[5] = te_linear_create(te, &(te_linear_desc){.in_features = s->activation ? F / 2 : F, .out_features = H, .gemm = gemm});
        list[6] = te_bias_create(te, &(te_bias_desc){.size = H, .params_dtype = dtype});
        list[7] = te_dropout_create(te, &(te_dropout_desc){.p = 0.5f});
        list[8] = te_identity_create(te, NULL);
        return te_sequential_create(te, list, 9);
    }
    case OWN_ATTENTION:
    case OWN_SOFTMAX:
    case OWN_FACTORS:
    case OWN_EXPERTS: return make_own(te, s, &gemm);
    case GROUPED: return te_grouped_linear_create(te, &(te_grouped_linear_desc){.num_gemms = 3, .in_features = H, .out_features = F, .gemm = gemm});
    default:
        return te_causal_lm_create(te, &(te_causal_lm_desc){.vocab_size = VOCAB, .hidden_size = H, .intermediate_size = F, .num_hidden_layers = 2, .num_attention_heads = HEADS,
                                                            .num_key_value_heads = s->groups, .head_dim = D, .tie_word_embeddings = s->tied, .qk_norm = s->qk_norm != TE_QK_NORM_NONE,
                                                            .sliding_window = s->window.on ? s->window.left + 1 : 0, .sliding_layers = (const bool[]){true, false},
                                                            .final_logit_softcapping = s->caps ? 20.0f : 0.0f, .attn_logit_softcapping = s->caps ? 5.0f : 0.0f,
                                                            .feedforward_norms = s->caps, .embedding_scale = s->caps ? 8.0f : 0.0f, .params_dtype = dtype, .init.std = 0.1f,
                                                            .rotary.scaling = s->llama3 ? (te_rope_scaling){.type = TE_ROPE_LLAMA3, .factor = 8, .original_max_position_embeddings = 64, .low_freq_factor = 1, .high_freq_factor = 4}
                                                                                                        : (te_rope_scaling){0}});
    }
}
/* Biases that are not 0, norms that are not the identity. */
static bool stir(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te_ctx *te = te_module_ctx(m);
    (void)user;
    if (kind != TE_ENTRY_PARAMETER || te_tensor_is_quantized(x) || te_tensor_ndim(x) != 1) return true;
    bool gain = strstr(path, "weight") != NULL;
    te_scope_begin(te);
    te_no_grad_begin(te);
    te_tensor_copy(x, te_tensor_normal(te, te_tensor_dtype(x), 1, te_tensor_shape(x), gain ? 1.0f : 0.0f, 0.2f));
    te_no_grad_end(te);
    te_scope_end(te);
    return true;
}

/* ---- calls ---- */

typedef struct call {
    te_forward_args args;
    te_rotary_desc rotary, rotary_key;
    const char *names[MOST]; /* of the tensors, as the graph has them */
    te_tensor *tensors[MOST];
    int n;
} call;
static te_tensor *with(call *c, const char *name, te_tensor *x) {
    c->names[c->n] = name;
    c->tensors[c->n++] = x;
    return x;
}
static te_tensor *hidden(te_ctx *te, te_dtype dtype, te_qkv_format format, int64_t b, int64_t s, int dims, const int64_t *rest) {
    int64_t shape[5] = {format == TE_BSHD ? b : s, format == TE_BSHD ? s : b, 0, 0, 0};
    for (int i = 0; i < dims; i++) shape[2 + i] = rest[i];
    return te_tensor_normal(te, dtype, 2 + dims, shape, 0, 1);
}
static te_tensor *ids(te_ctx *te, int ndim, const int64_t *shape, int64_t limit) {
    static int32_t values[4096];
    int64_t n = 1;
    for (int i = 0; i < ndim; i++) n *= shape[i];
    for (int64_t i = 0; i < n; i++) values[i] = (int32_t)((i * 7 + 3 * (i / 5)) % limit);
    return te_tensor_from_host(te, TE_I32, ndim, shape, values);
}
/* A table of angles, of half a head's channels. */
static te_tensor *table(te_ctx *te, const scene *s, int64_t b, int64_t length) {
    return te_tensor_uniform(te, TE_F32, 4, (int64_t[]){s->freqs == 2 ? 50 : length, s->freqs == 2 ? 1 : b, 1, D / 2}, -3, 3);
}
/* Every third key, another one for each query, and all keys of the second query. */
static te_tensor *mask(te_ctx *te, int64_t b, int64_t s_q, int64_t s_kv) {
    static uint8_t values[65536];
    for (int64_t i = 0; i < b * s_q * s_kv; i++) values[i] = (i / s_kv + i % s_kv) % 3 == 0 || i / s_kv % s_q == 1;
    return te_tensor_from_host(te, TE_U8, 4, (int64_t[]){b, 1, s_q, s_kv}, values);
}
/* Sequence i lacks its last 1 + i tokens. */
static te_tensor *padding(te_ctx *te, int64_t b, int64_t length) {
    static uint8_t values[4096];
    for (int64_t i = 0; i < b * length; i++) values[i] = i % length >= length - 1 - i / length;
    return te_tensor_from_host(te, TE_U8, 4, (int64_t[]){b, 1, 1, length}, values);
}
static void prepare(call *c, te_ctx *te, const scene *s, te_dtype dtype, int64_t b, int64_t length) {
    const int64_t width[] = {H}, heads[] = {HEADS, D}, groups[] = {s->groups ? s->groups : HEADS, D};
    memset(c, 0, sizeof *c);
    switch (s->kind) {
    case EMBEDDING:
    case LM: c->args.input = with(c, "input", ids(te, 2, (int64_t[]){b, length}, VOCAB)); break;
    case OWN_EXPERTS: c->args.input = with(c, "input", te_tensor_normal(te, dtype, 2, (int64_t[]){b * length, H}, 0, 1)); break;
    case OWN_SOFTMAX: c->args.input = with(c, "input", hidden(te, dtype, s->format, b, length, 2, heads)); break;
    case OWN_ATTENTION:
    case CORE:
        if (s->packed) {
            c->args.attention.qkv_layer = with(c, "qkv_layer", hidden(te, dtype, s->format, b, length, 3, (const int64_t[]){3, HEADS, D}));
            break;
        }
        c->args.input = with(c, "input", hidden(te, dtype, s->format, b, length, 2, heads));
        c->args.key = with(c, "key", hidden(te, dtype, s->format, b, length + 5, 2, groups));
        c->args.value = with(c, "value", hidden(te, dtype, s->format, b, length + 5, 2, groups));
        break;
    case GROUPED: {
        int64_t rows = b * length, sizes[3] = {rows / 4, 0, rows - rows / 4 - (s->unused_rows ? 3 : 0)};
        c->args.input = with(c, "input", te_tensor_normal(te, dtype, 2, (int64_t[]){rows, H}, 0, 1));
        c->args.m_splits_tensor = with(c, "m_splits_tensor", te_tensor_from_host(te, TE_I64, 1, (int64_t[]){3}, sizes));
        break;
    }
    default: c->args.input = with(c, "input", hidden(te, dtype, s->format, b, length, 1, width));
    }
    if (s->cross) c->args.encoder_output = with(c, "encoder_output", hidden(te, dtype, s->format, b, length + 16, 1, width));
    if (s->bias == TE_ATTN_BIAS_PRE_SCALE) c->args.attention.core_attention_bias = with(c, "core_attention_bias", te_tensor_normal(te, dtype, 4, (int64_t[]){1, HEADS, length, length + 5}, 0, 1));
    if (s->bias == TE_ATTN_BIAS_POST_SCALE) c->args.attention.core_attention_bias = with(c, "core_attention_bias", te_tensor_normal(te, dtype, 4, (int64_t[]){b, 1, 1, length + 5}, 0, 1));
    if (s->slopes) c->args.attention.alibi_slopes = with(c, "alibi_slopes", te_tensor_uniform(te, TE_F32, 2, (int64_t[]){b, HEADS}, 0, 1));
    if (s->arbitrary_mask) c->args.attention.attention_mask = with(c, "attention_mask", mask(te, b, length, length + 5));
    if (s->padding) {
        int64_t keys = s->kind == CORE ? length + 5 : length;
        c->args.attention.attention_mask = with(c, "attention_mask", padding(te, b, keys));
        if (s->kind == CORE) c->args.attention.attention_mask_q = with(c, "attention_mask_q", padding(te, b, length));
    }
    if (s->enc_dec_padding) {
        c->args.cross.enc_dec_attn_mask = with(c, "enc_dec_attn_mask", padding(te, b, length + 16));
        c->args.cross.enc_dec_attn_mask_q = with(c, "enc_dec_attn_mask_q", padding(te, b, length));
    }
    if (s->rotary) {
        c->rotary = s->turn;
        if (s->starts) c->rotary.start_positions = with(c, "start_positions", ids(te, 1, (int64_t[]){b}, 9));
        if (s->positions) c->rotary.positions = with(c, "positions", ids(te, 2, (int64_t[]){b, length}, 50));
        if (s->freqs) c->rotary.freqs = with(c, "freqs", table(te, s, b, length));
        c->args.rotary = &c->rotary;
        c->rotary_key = s->turn;
        if (s->key_turn && s->freqs) c->rotary_key.freqs = with(c, "freqs_key", table(te, s, b, length));
        if (s->key_turn && s->starts) c->rotary_key.start_positions = with(c, "start_positions_key", ids(te, 1, (int64_t[]){b}, 6));
        if (s->key_turn && s->positions) c->rotary_key.positions = with(c, "positions_key", ids(te, 2, (int64_t[]){b, length}, 37));
        if (s->key_turn) c->args.rotary_key = &c->rotary_key;
    }
}

static te_tensor *as_written(te_tensor *x) {
    te_dtype dtype = te_tensor_dtype(x);
    return dtype == TE_I32 || dtype == TE_I64 || dtype == TE_U8 ? x : te_tensor_cast(x, TE_F32);
}
static void write_call(te_ctx *te, const char *path, const call *c) {
    const char *const out_names[] = {"out.out", "out.output_bias", "out.ln_out", "out.max_logit", "out.m_splits"};
    const te_outputs *y = &c->args.outputs;
    te_tensor *const made[] = {y->out, y->bias, y->ln_out, y->max_logit, y->m_splits};
    te_safetensors_item items[MOST + 5];
    char names[MOST][64];
    int n = 0;
    for (int i = 0; i < c->n; i++) {
        snprintf(names[i], sizeof names[i], "in.%s", c->names[i]);
        items[n++] = (te_safetensors_item){names[i], as_written(c->tensors[i])};
    }
    for (int i = 0; i < 5; i++)
        if (made[i]) items[n++] = (te_safetensors_item){out_names[i], as_written(made[i])};
    te_safetensors_write(te, path, items, n, NULL, 0);
}

/* ---- a case ---- */

static bool has_products(const scene *s) { return s->kind != NORM && s->kind != BACKEND && s->kind != EMBEDDING && s->kind != CORE && s->kind != OWN_ATTENTION && s->kind != OWN_SOFTMAX; }

static void export_case(te_ctx *te, const char *folder, const char *name, const scene *s, const mode *m) {
    /* Recipes want rows in multiples of 32; without one sizes are odd. */
    const int64_t other[2][2] = {{3, m->recipe ? 32 : 21}, {1, m->recipe ? 96 : 37}};
    te_recipe recipe = recipe_of(m->recipe);
    recipe.fp8_dpa = m->dpa;
    te_autocast_desc autocast = {.recipe = &recipe, .disabled = !m->recipe || m->plain};
    te_module *module;
    call c;
    char path[1024];
    te_scope_begin(te);
    te_seed(te, 5);
    if (m->stored) te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
    module = make(te, s, m->dtype);
    if (m->stored) te_quantized_model_init_end(te);
    check(te, name);
    te_module_visit_tensors(module, stir, NULL);
    for (int step = 0; step < 3 && m->recipe == TE_RECIPE_DELAYED; step++) { /* scales that are not 1 */
        prepare(&c, te, s, m->dtype, 2, 32);
        te_autocast_begin(te, &autocast);
        te_forward_with(module, &c.args);
        te_autocast_end(te);
    }
    te_module_train(module, false);
    te_autocast_begin(te, &autocast);
    prepare(&c, te, s, m->dtype, s->one ? 1 : 2, m->recipe ? 32 : 5);
    if (s->alias && c.args.key) c.args.value = c.args.key;
    if (s->alias) c.rotary_key.start_positions = c.rotary.start_positions;
    snprintf(path, sizeof path, "%s/%s.onnx", folder, name);
    te_onnx_export(module, &c.args, path);
    check(te, name);
    te_no_grad_begin(te);
    for (int i = 0; i < 2; i++) {
        prepare(&c, te, s, m->dtype, other[i][0], other[i][1]);
        te_forward_with(module, &c.args);
        snprintf(path, sizeof path, "%s/%s.%d.safetensors", folder, name, i + 1);
        write_call(te, path, &c);
        check(te, name);
    }
    te_no_grad_end(te);
    te_autocast_end(te);
    te_module_destroy(module);
    te_scope_end(te);
    printf("%s\n", name);
}

int main(int argc, char **argv) {
    if (argc < 2) return fprintf(stderr, "usage: export_onnx FOLDER [WORD ...]\n"), 2;
    te_ctx *te = te_ctx_create(NULL);
    check(te, "te_ctx_create");
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++)
        for (size_t k = 0; k < sizeof modes / sizeof *modes; k++) {
            char name[128];
            bool wanted = argc == 2;
            /* A weight in several parameters is not stored quantized; the groups of GroupedLinear are codes that are moved apart from their scales, which is refused. */
            if (modes[k].recipe && (!has_products(&scenes[i]) || (modes[k].stored && (scenes[i].split || ((scenes[i].kind == GROUPED || scenes[i].kind == OWN_EXPERTS) && !modes[k].plain))))) continue;
            if (modes[k].dpa && scenes[i].kind != ATTENTION && scenes[i].kind != LAYER) continue;
            snprintf(name, sizeof name, "%s.%s", scenes[i].name, modes[k].name);
            for (int w = 2; w < argc; w++) wanted = wanted || strstr(name, argv[w]);
            if (wanted) export_case(te, argv[1], name, &scenes[i], &modes[k]);
        }
    te_ctx_destroy(te);
    return 0;
}
