/* api/nn.h: the modules that TransformerEngine has, by their names. Every desc is zero-initialised, and zero is the default.
 *
 * Each create function returns a module that the caller owns (te_module_destroy, or a parent by te_module_add_child), with its parameters
 * initialised from the context's random state, or NULL: TE_ERR_INVALID for sizes that do not fit, TE_ERR_DTYPE for a params_dtype other than f32, f16
 * and bf16, TE_ERR_STATE inside a graph's capture. It allocates and does not sync. Inputs are f32, f16 or bf16 of any shape [.., in] unless said
 * otherwise. Under autocast the products are quantized. */

/* The norm of a module that has one. */
typedef enum te_normalization {
    TE_NORM_DEFAULT = 0, /* LayerNorm */
    TE_LAYERNORM = 1,    /* (x - mean) / sqrt(variance + eps) * weight + bias */
    TE_RMSNORM = 2       /* x / sqrt(mean(x^2) + eps) * weight */
} te_normalization;

/* The first values of weights: N(0, std^2). Biases begin at 0, norms at the identity. */
typedef struct te_init {
    float std;     /* 0 => 0.023 */
    bool no_init;  /* the weights stay uninitialised, for a checkpoint that will be loaded */
} te_init;

/* y = x W^T + b. Parameters: weight [out, in], bias [out].
 * Source: transformer_engine.pytorch.Linear. */
typedef struct te_linear_desc {
    int64_t in_features, out_features; /* last size of the input, of the output; 1 or more */
    bool no_bias;                      /* no parameter bias */
    bool return_bias;                  /* the bias is not added; the outputs are y, bias */
    te_init init;                      /* of the weight */
    te_dtype params_dtype;             /* f32, f16, bf16; 0 => bf16 */
    bool fuse_wgrad_accumulation;      /* the weight's gradient is added into te_tensor_main_grad(weight), where it has one */
    const char *name;                  /* of the module, copied; NULL => "linear" */
} te_linear_desc;
/* A Linear module. */
TE_API te_module *te_linear_create(te_ctx *te, const te_linear_desc *desc);

/* The norm of each row. Parameters: weight [hidden], bias [hidden] (LayerNorm).
 * Source: transformer_engine.pytorch.LayerNorm, RMSNorm. */
typedef struct te_norm_desc {
    int64_t hidden_size;      /* last size of the input */
    float eps;                /* 0 => 1e-5 */
    bool zero_centered_gamma; /* the factor is weight + 1, and weights begin at 0 */
    te_dtype params_dtype;    /* f32, f16, bf16; 0 => bf16 */
    const char *name;         /* of the module, copied; NULL => "layernorm" or "rmsnorm" */
} te_norm_desc;
/* A LayerNorm module. */
TE_API te_module *te_layernorm_create(te_ctx *te, const te_norm_desc *desc);
/* An RMSNorm module. */
TE_API te_module *te_rmsnorm_create(te_ctx *te, const te_norm_desc *desc);

/* y = norm(x) W^T + b. Parameters: layer_norm_weight [in], layer_norm_bias [in] (LayerNorm), weight [out, in], bias [out].
 * Source: transformer_engine.pytorch.LayerNormLinear. */
typedef struct te_layernorm_linear_desc {
    int64_t in_features, out_features; /* last size of the input, of the output; 1 or more */
    float eps;                         /* of the norm; 0 => 1e-5 */
    te_normalization normalization;    /* 0 => LayerNorm */
    bool zero_centered_gamma;          /* the norm's factor is weight + 1 */
    bool no_bias;                      /* no parameter bias */
    bool return_bias;                  /* the bias is not added; it is the second output */
    bool return_layernorm_output;      /* norm(x) is the last output, in high precision */
    te_init init;                      /* of the weight */
    te_dtype params_dtype;             /* f32, f16, bf16; 0 => bf16 */
    bool fuse_wgrad_accumulation;      /* as in te_linear_desc */
    const char *name;                  /* of the module, copied; NULL => "layernorm_linear" */
} te_layernorm_linear_desc;
/* A LayerNormLinear module. */
TE_API te_module *te_layernorm_linear_create(te_ctx *te, const te_layernorm_linear_desc *desc);

/* y = act(norm(x) W1^T + b1) W2^T + b2. Parameters: layer_norm_weight, layer_norm_bias (LayerNorm), fc1_weight [ffn, hidden], fc1_bias,
 * fc2_weight [hidden, ffn], fc2_bias. With a gated activation fc1 has 2 * ffn rows, whose first half goes through the nonlinearity.
 * Source: transformer_engine.pytorch.LayerNormMLP. */
typedef struct te_layernorm_mlp_desc {
    int64_t hidden_size, ffn_hidden_size; /* last size of input and output; of the activation's output */
    float eps;                            /* of the norm; 0 => 1e-5 */
    te_normalization normalization;       /* 0 => LayerNorm */
    te_activation activation;             /* 0 => GELU */
    bool zero_centered_gamma;             /* the norm's factor is weight + 1 */
    bool no_bias;                         /* neither fc1_bias nor fc2_bias */
    bool return_bias;                     /* fc2_bias is not added; it is the second output */
    bool return_layernorm_output;         /* norm(x) is the last output, in high precision */
    te_init init, output_layer_init;      /* of fc1_weight; of fc2_weight */
    te_dtype params_dtype;                /* f32, f16, bf16; 0 => bf16 */
    bool fuse_wgrad_accumulation;         /* as in te_linear_desc, for both weights */
    const char *name;                     /* of the module, copied; NULL => "layernorm_mlp" */
} te_layernorm_mlp_desc;
/* A LayerNormMLP module. */
TE_API te_module *te_layernorm_mlp_create(te_ctx *te, const te_layernorm_mlp_desc *desc);

/* Attention without parameters. Forward: input = queries [s_q, b, H, d], key, value [s_kv, b, G, d] (or b first) -> [s_q, b, H * d].
 * Source: transformer_engine.pytorch.DotProductAttention. */
typedef struct te_dot_product_attention_desc {
    int num_attention_heads;           /* H */
    int64_t kv_channels;               /* d, at most 256 */
    int num_gqa_groups;                /* G, which divides H; 0 => num_attention_heads */
    float attention_dropout;           /* probability, in training; 0 => none */
    te_qkv_format qkv_format;          /* order of the dimensions; 0 => [s, b, H, d] */
    te_attn_mask attn_mask_type;       /* 0 => causal */
    bool has_window;                   /* the window below applies */
    int64_t window_left, window_right; /* as in te_attention_desc */
    float softmax_scale;               /* 0 => 1 / sqrt(d) */
    const char *name;                  /* of the module, copied; NULL => "core_attention" */
} te_dot_product_attention_desc;
/* A DotProductAttention module. */
TE_API te_module *te_dot_product_attention_create(te_ctx *te, const te_dot_product_attention_desc *desc);

/* Self attention with its projections, [s, b, h] or [b, s, h] -> the same shape. Children: layernorm_qkv (LayerNormLinear, with input_layernorm) or
 * qkv (Linear), of out_features (H + 2G) * d; core_attention (DotProductAttention); proj (Linear).
 * Source: transformer_engine.pytorch.MultiheadAttention. */
typedef struct te_multihead_attention_desc {
    int64_t hidden_size;               /* h */
    int num_attention_heads;           /* H */
    int num_gqa_groups;                /* G, which divides H; 0 => num_attention_heads */
    int64_t kv_channels;               /* d, at most 256; 0 => hidden_size / num_attention_heads */
    float attention_dropout;           /* probability, in training; 0 => none */
    float layernorm_epsilon;           /* of the input's norm; 0 => 1e-5 */
    bool input_layernorm;              /* a norm before the projection */
    bool return_layernorm_output;      /* with input_layernorm: norm(x) is the last output */
    te_normalization normalization;    /* 0 => LayerNorm */
    bool zero_centered_gamma;          /* the norm's factor is weight + 1 */
    te_qkv_format qkv_format;          /* of the input too: 0 => [s, b, h], TE_BSHD => [b, s, h] */
    te_attn_mask attn_mask_type;       /* 0 => causal */
    bool has_window;                   /* the window below applies */
    int64_t window_left, window_right; /* as in te_attention_desc */
    bool no_bias;                      /* neither projection has a bias */
    bool return_bias;                  /* proj's bias is not added; it is the second output */
    bool qkv_weight_not_interleaved;   /* rows of the projection are ordered [Q | K | V]; false => by groups, (its queries, k, v) */
    float softmax_scale;               /* 0 => 1 / sqrt(d) */
    te_init init, output_layer_init;   /* of the first projection; of proj */
    te_dtype params_dtype;             /* f32, f16, bf16; 0 => bf16 */
    bool fuse_wgrad_accumulation;      /* as in te_linear_desc, for both weights */
    const char *name;                  /* of the module, copied; NULL => "self_attention" */
} te_multihead_attention_desc;
/* A MultiheadAttention module. */
TE_API te_module *te_multihead_attention_create(te_ctx *te, const te_multihead_attention_desc *desc);

/* A layer of a transformer, [s, b, h] or [b, s, h] -> the same shape: h = x + dropout(attention(norm(x))), y = h + dropout(mlp(norm(h))).
 * Children: self_attention (MultiheadAttention), layernorm_mlp (LayerNormMLP), layernorm (with output_layernorm).
 * Source: transformer_engine.pytorch.TransformerLayer, layer_type "encoder": self attention alone. */
typedef struct te_transformer_layer_desc {
    int64_t hidden_size, ffn_hidden_size;           /* h; inner size of the MLP */
    int num_attention_heads;                        /* H */
    int num_gqa_groups;                             /* G, which divides H; 0 => num_attention_heads */
    int64_t kv_channels;                            /* d, at most 256; 0 => hidden_size / num_attention_heads */
    float layernorm_epsilon;                        /* of every norm; 0 => 1e-5 */
    float hidden_dropout;                           /* probability, in training; 0 => none (TransformerEngine: 0.1) */
    float attention_dropout;                        /* probability, in training; 0 => none (TransformerEngine: 0.1) */
    te_normalization normalization;                 /* 0 => LayerNorm */
    te_activation activation;                       /* of the MLP; 0 => GELU */
    te_qkv_format attn_input_format;                /* 0 => [s, b, h], TE_BSHD => [b, s, h] */
    te_attn_mask self_attn_mask_type;               /* 0 => causal */
    bool has_window;                                /* the window below applies */
    int64_t window_left, window_right;              /* as in te_attention_desc */
    bool no_bias;                                   /* no projection has a bias */
    bool zero_centered_gamma;                       /* the norms' factor is weight + 1 */
    bool apply_residual_connection_post_layernorm;  /* the residuals are the norms' outputs; false => their inputs */
    bool output_layernorm;                          /* a norm of y, and none at the attention's input */
    bool parallel_attention_mlp;                    /* y = x + dropout(attention(norm(x)) + mlp(norm(x))) */
    bool qkv_weight_not_interleaved;                /* as in te_multihead_attention_desc */
    te_init init, output_layer_init;                /* of the first weights of attention and MLP; of their last ones */
    te_dtype params_dtype;                          /* f32, f16, bf16; 0 => bf16 */
    bool fuse_wgrad_accumulation;                   /* as in te_linear_desc, for all weights of products */
    const char *name;                               /* of the module, copied; NULL => "layer" */
} te_transformer_layer_desc;
/* A TransformerLayer module. */
TE_API te_module *te_transformer_layer_create(te_ctx *te, const te_transformer_layer_desc *desc);

/* A table of vectors. Parameter: weight [num_embeddings, embedding_dim]. Forward: ids, i32 or i64 [..] -> [.., embedding_dim]; an id outside the table
 * gives zeros. Source: torch.nn.Embedding. */
typedef struct te_embedding_desc {
    int64_t num_embeddings, embedding_dim; /* rows of the table, and their size */
    te_init init;                          /* of the weight */
    te_dtype params_dtype;                 /* of the weight and the output: f32, f16, bf16; 0 => bf16 */
    const char *name;                      /* of the module, copied; NULL => "embedding" */
} te_embedding_desc;
/* An Embedding module. */
TE_API te_module *te_embedding_create(te_ctx *te, const te_embedding_desc *desc);

/* A module that runs `n` modules in order, each on the first output of the one before; the last one's outputs are its own. n 0: the input comes back.
 * The rest of the call (mask, rotary, is_first_microbatch ...) goes to every child. Children are named "0", "1", ... in this order, so paths read
 * "0.weight", "1.self_attention.proj.bias"; te_module_add_child appends more.
 *
 * The call takes the children: the container owns them, and they are destroyed if it cannot be made, so they may be created in the list itself.
 * Errors: TE_ERR_INVALID for a NULL child, one of another context, one that has a parent (which keeps it) or is in the list twice; TE_ERR_STATE in
 * forward if a child before the last gives several outputs (return_bias).
 * Source: torch.nn.Sequential. */
TE_API te_module *te_sequential_create(te_ctx *te, te_module *const *children, int n);
