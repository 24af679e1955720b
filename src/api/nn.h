/* api/nn.h: the modules that TransformerEngine has, by their names. Every desc is zero-initialised, and zero is the default. */

typedef enum te_normalization { TE_NORM_DEFAULT = 0 /* LayerNorm */, TE_LAYERNORM = 1, TE_RMSNORM = 2 } te_normalization;

/* How weights start: N(0, std^2). */
typedef struct te_init {
    float std;     /* 0 => 0.023 */
    bool no_init;  /* leave uninitialised (a checkpoint will be loaded) */
} te_init;

/* y = x W^T + b. Parameters: weight [out, in], bias [out].
 * Source: transformer_engine.pytorch.Linear. */
typedef struct te_linear_desc {
    int64_t in_features, out_features;
    bool no_bias;
    bool return_bias; /* bias is not added; outputs are (y, bias) */
    te_init init;
    te_dtype params_dtype; /* 0 => bf16 */
    bool fuse_wgrad_accumulation; /* the weight gradient is added into te_tensor_main_grad(weight) */
    const char *name;
} te_linear_desc;
TE_API te_module *te_linear_create(te_ctx *te, const te_linear_desc *desc);

/* Parameters: weight [hidden], bias [hidden] (LayerNorm).
 * Source: transformer_engine.pytorch.LayerNorm, RMSNorm. */
typedef struct te_norm_desc {
    int64_t hidden_size;
    float eps; /* 0 => 1e-5 */
    bool zero_centered_gamma;
    te_dtype params_dtype;
    const char *name;
} te_norm_desc;
TE_API te_module *te_layernorm_create(te_ctx *te, const te_norm_desc *desc);
TE_API te_module *te_rmsnorm_create(te_ctx *te, const te_norm_desc *desc);

/* y = Linear(norm(x)). Parameters: layer_norm_weight, layer_norm_bias, weight, bias.
 * Source: transformer_engine.pytorch.LayerNormLinear. */
typedef struct te_layernorm_linear_desc {
    int64_t in_features, out_features;
    float eps;
    te_normalization normalization;
    bool zero_centered_gamma;
    bool no_bias, return_bias;
    bool return_layernorm_output; /* outputs gain ln_out */
    te_init init;
    te_dtype params_dtype;
    bool fuse_wgrad_accumulation;
    const char *name;
} te_layernorm_linear_desc;
TE_API te_module *te_layernorm_linear_create(te_ctx *te, const te_layernorm_linear_desc *desc);

/* y = act(norm(x) W1^T + b1) W2^T + b2. Parameters: layer_norm_weight, layer_norm_bias, fc1_weight, fc1_bias, fc2_weight,
 * fc2_bias. Gated activations: fc1 has 2 * ffn rows, the first half goes through the nonlinearity.
 * Source: transformer_engine.pytorch.LayerNormMLP. */
typedef struct te_layernorm_mlp_desc {
    int64_t hidden_size, ffn_hidden_size;
    float eps;
    te_normalization normalization;
    te_activation activation; /* 0 => GELU */
    bool zero_centered_gamma;
    bool no_bias, return_bias, return_layernorm_output;
    te_init init, output_layer_init;
    te_dtype params_dtype;
    bool fuse_wgrad_accumulation;
    const char *name;
} te_layernorm_mlp_desc;
TE_API te_module *te_layernorm_mlp_create(te_ctx *te, const te_layernorm_mlp_desc *desc);

/* transformer_engine.pytorch.DotProductAttention. Forward: input = q [s, b, H, d], key, value [s, b, G, d] -> [s, b, H * dv]. */
typedef struct te_dot_product_attention_desc {
    int num_attention_heads;
    int64_t kv_channels;
    int num_gqa_groups; /* 0 => num_attention_heads */
    float attention_dropout;
    te_qkv_format qkv_format;
    te_attn_mask attn_mask_type; /* 0 => causal */
    bool has_window;
    int64_t window_left, window_right;
    float softmax_scale;
    const char *name;
} te_dot_product_attention_desc;
TE_API te_module *te_dot_product_attention_create(te_ctx *te, const te_dot_product_attention_desc *desc);

/* transformer_engine.pytorch.MultiheadAttention. Children: layernorm_qkv (with input_layernorm) or qkv; core_attention; proj. */
typedef struct te_multihead_attention_desc {
    int64_t hidden_size;
    int num_attention_heads;
    int num_gqa_groups;
    int64_t kv_channels; /* 0 => hidden_size / num_attention_heads */
    float attention_dropout;
    float layernorm_epsilon;
    bool input_layernorm;
    bool return_layernorm_output;
    te_normalization normalization;
    bool zero_centered_gamma;
    te_qkv_format qkv_format;
    te_attn_mask attn_mask_type;
    bool has_window;
    int64_t window_left, window_right;
    bool no_bias, return_bias;
    bool qkv_weight_not_interleaved; /* rows [Q | K | V] in place of [groups, (q.., k, v)] */
    float softmax_scale;
    te_init init, output_layer_init;
    te_dtype params_dtype;
    bool fuse_wgrad_accumulation;
    const char *name;
} te_multihead_attention_desc;
TE_API te_module *te_multihead_attention_create(te_ctx *te, const te_multihead_attention_desc *desc);

/* transformer_engine.pytorch.TransformerLayer. Children: self_attention, layernorm_mlp[, layernorm]. */
typedef struct te_transformer_layer_desc {
    int64_t hidden_size, ffn_hidden_size;
    int num_attention_heads;
    int num_gqa_groups;
    int64_t kv_channels;
    float layernorm_epsilon;
    float hidden_dropout;    /* 0 => none (TransformerEngine's own default is 0.1) */
    float attention_dropout; /* 0 => none (TransformerEngine's own default is 0.1) */
    te_normalization normalization;
    te_activation activation;
    te_qkv_format attn_input_format;
    te_attn_mask self_attn_mask_type;
    bool has_window;
    int64_t window_left, window_right;
    bool no_bias;
    bool zero_centered_gamma;
    bool apply_residual_connection_post_layernorm;
    bool output_layernorm;
    bool parallel_attention_mlp;
    bool qkv_weight_not_interleaved;
    te_init init, output_layer_init;
    te_dtype params_dtype;
    bool fuse_wgrad_accumulation;
    const char *name;
} te_transformer_layer_desc;
TE_API te_module *te_transformer_layer_create(te_ctx *te, const te_transformer_layer_desc *desc);

/* Parameter: weight [num_embeddings, embedding_dim]. Forward: ids i32/i64 [..] -> [.., embedding_dim]. */
typedef struct te_embedding_desc {
    int64_t num_embeddings, embedding_dim;
    te_init init;
    te_dtype params_dtype;
    const char *name;
} te_embedding_desc;
TE_API te_module *te_embedding_create(te_ctx *te, const te_embedding_desc *desc);

/* Modules run in order, each on the first output of the one before; the last one's outputs are the container's. No child: the input comes back. The rest
 * of the call (mask, rotary, is_first_microbatch ...) goes to every child. Children are named "0", "1", ... in this order, so paths read "0.weight",
 * "1.self_attention.proj.bias"; te_module_add_child appends more.
 *
 * Takes the children: they are owned by the container from the call on, and destroyed if it cannot be made, so they may be created in the list
 * itself. Errors: TE_ERR_INVALID for a NULL child, one of another context, one that has a parent (which keeps it) or is in the list twice; TE_ERR_STATE in
 * forward if a child before the last gives several outputs (return_bias).
 * Source: torch.nn.Sequential. */
TE_API te_module *te_sequential_create(te_ctx *te, te_module *const *children, int n);
