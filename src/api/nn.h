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
    float std;    /* 0 => 0.023 */
    bool no_init; /* leave uninitialised (a checkpoint will be loaded) */
} te_init;

/* ---- options -------------------------------------------------------------------------------------------------
 * Groups of options that several modules have. A desc embeds them, and a module hands them to its children whole. Names are TransformerEngine's; zero
 * is the default. A field that says "not yet" is refused, by name, when it is set. */

/* Of every module with weights that multiply. */
typedef struct te_gemm_options {
    bool no_bias;     /* no bias parameters */
    bool return_bias; /* the bias is not added: it is the output `bias`, for a caller who fuses the addition */
    te_init init;     /* of the weights; biases start at 0 */
    te_dtype params_dtype;        /* of parameters: f32, f16 or bf16; 0 => bf16 */
    bool fuse_wgrad_accumulation; /* weight gradients are added into te_tensor_main_grad(weight) by the product that makes them */
    bool delay_wgrad_compute;     /* te_backward leaves weight gradients to te_backward_dw */
    bool save_original_input;     /* not yet: the backward pass quantizes the input again in place of keeping a quantized copy */
} te_gemm_options;

/* Of every module with a norm. */
typedef struct te_norm_options {
    te_normalization normalization; /* 0 => LayerNorm */
    float eps;                      /* added to the variance; 0 => 1e-5 */
    bool zero_centered_gamma;       /* the norm multiplies by 1 + weight, and the weight starts at 0 */
} te_norm_options;

/* Of every module with attention. */
typedef struct te_attention_options {
    int num_attention_heads;    /* query heads */
    int num_gqa_groups;         /* heads of keys and values, which divide those; 0 => num_attention_heads */
    int64_t kv_channels;        /* size of a head; 0 => hidden_size / num_attention_heads */
    float attention_dropout;    /* probability; 0 => none (TransformerEngine's TransformerLayer has 0.1) */
    te_qkv_format qkv_format;   /* 0 => sbhd; attn_input_format of a TransformerLayer */
    te_attn_mask attn_mask_type; /* 0 => causal; self_attn_mask_type of a TransformerLayer */
    te_window window;           /* window_size */
    float softmax_scale;        /* 0 => 1 / sqrt(kv_channels) */
    bool no_qkv_weight_interleaved; /* rows of the weight are [Q | K | V] in place of [groups, (q.., k, v)]; qkv_weight_interleaved = False */
    bool checkpoint_core_attention; /* softmax and its products run again in the backward pass: te_module_set_checkpoint(core_attention) */
} te_attention_options;

/* ---- modules ------------------------------------------------------------------------------------------------- */

/* y = x W^T + b. Parameters: weight [out, in], bias [out]. Outputs: out[, bias].
 * Source: transformer_engine.pytorch.Linear. */
typedef struct te_linear_desc {
    int64_t in_features, out_features; /* last sizes of x and y; at least 1 */
    te_gemm_options gemm; /* of the product */
    const char *name; /* copied; NULL => "linear" */
} te_linear_desc;
/* Owned by the caller, or by the parent it is given to, as all modules are. NULL on an error. */
TE_API te_module *te_linear_create(te_ctx *te, const te_linear_desc *desc);

/* LayerNorm: (x - mean) / sqrt(variance + eps) * weight + bias; RMSNorm: x / sqrt(mean of squares + eps) * weight. Parameters: weight [hidden], bias
 * [hidden] (LayerNorm). Source: transformer_engine.pytorch.LayerNorm, RMSNorm. */
typedef struct te_norm_desc {
    int64_t hidden_size;   /* last size of x */
    te_norm_options norm;  /* normalization is the create function's */
    te_dtype params_dtype; /* 0 => bf16 */
    const char *name;      /* copied; NULL => "layernorm", "rmsnorm" */
} te_norm_desc;
/* A module that normalises rows by their mean and variance. */
TE_API te_module *te_layernorm_create(te_ctx *te, const te_norm_desc *desc);
/* A module that normalises rows by their mean square. */
TE_API te_module *te_rmsnorm_create(te_ctx *te, const te_norm_desc *desc);

/* y = Linear(norm(x)). Parameters: layer_norm_weight, layer_norm_bias, weight, bias. Outputs: out[, bias][, ln_out].
 * Source: transformer_engine.pytorch.LayerNormLinear. */
typedef struct te_layernorm_linear_desc {
    int64_t in_features, out_features; /* last sizes of x and y; at least 1 */
    te_norm_options norm; /* of the norm in front */
    te_gemm_options gemm; /* of the product */
    bool return_layernorm_output; /* the norm's output is the output `ln_out` */
    const char *name; /* copied; NULL => "layernorm_linear" */
} te_layernorm_linear_desc;
/* A norm and the product behind it, which quantizes what the norm makes. */
TE_API te_module *te_layernorm_linear_create(te_ctx *te, const te_layernorm_linear_desc *desc);

/* y = act(norm(x) W1^T + b1) W2^T + b2. Parameters: layer_norm_weight, layer_norm_bias, fc1_weight, fc1_bias, fc2_weight,
 * fc2_bias. Gated activations: fc1 has 2 * ffn rows, the first half goes through the nonlinearity. Outputs: out[, bias][, ln_out].
 * Source: transformer_engine.pytorch.LayerNormMLP. */
typedef struct te_layernorm_mlp_desc {
    int64_t hidden_size, ffn_hidden_size; /* last sizes of x and y, and between the products */
    te_activation activation;     /* 0 => GELU */
    te_norm_options norm;
    te_gemm_options gemm;         /* init: of fc1 */
    te_init output_layer_init;    /* of fc2 */
    bool return_layernorm_output; /* the norm's output is the output `ln_out` */
    const char *name; /* copied; NULL => "layernorm_mlp" */
} te_layernorm_mlp_desc;
/* A norm, two products and the activation between them. */
TE_API te_module *te_layernorm_mlp_create(te_ctx *te, const te_layernorm_mlp_desc *desc);

/* softmax(q k^T * scale) v. Forward: input = q [s, b, H, d], key, value [s, b, G, d] -> [s, b, H * d]; bshd likewise.
 * Source: transformer_engine.pytorch.DotProductAttention. */
typedef struct te_dot_product_attention_desc {
    te_attention_options attention; /* kv_channels has no default here */
    const char *name; /* copied; NULL => "core_attention" */
} te_dot_product_attention_desc;
/* The attention core, without parameters. */
TE_API te_module *te_dot_product_attention_create(te_ctx *te, const te_dot_product_attention_desc *desc);

/* Attention with its projections. Children: layernorm_qkv (with input_layernorm) or qkv; core_attention; proj. Outputs: out[, bias][, ln_out].
 * Source: transformer_engine.pytorch.MultiheadAttention. */
typedef struct te_multihead_attention_desc {
    int64_t hidden_size; /* last size of x and y */
    te_attention_options attention; /* of the core */
    te_norm_options norm;         /* with input_layernorm */
    te_gemm_options gemm;         /* init: of the first projection */
    te_init output_layer_init;    /* of proj */
    bool input_layernorm;         /* a norm in front */
    bool return_layernorm_output; /* its output is the output `ln_out` */
    const char *name; /* copied; NULL => "self_attention" */
} te_multihead_attention_desc;
/* Projections to queries, keys and values, attention, and a projection back. */
TE_API te_module *te_multihead_attention_create(te_ctx *te, const te_multihead_attention_desc *desc);

/* A transformer's layer: attention and MLP, each with norm, dropout and residual. Children: self_attention, layernorm_mlp[, layernorm].
 * Source: transformer_engine.pytorch.TransformerLayer. */
typedef struct te_transformer_layer_desc {
    int64_t hidden_size, ffn_hidden_size; /* last sizes of x and y, and inside the MLP */
    te_attention_options attention; /* of the core */
    te_norm_options norm;
    te_gemm_options gemm;      /* return_bias has no meaning here */
    te_init output_layer_init; /* of the second projection of each half */
    te_activation activation;  /* 0 => GELU */
    float hidden_dropout;      /* 0 => none (TransformerEngine's own default is 0.1) */
    bool apply_residual_connection_post_layernorm; /* residuals begin at the norms' outputs */
    bool output_layernorm;     /* the norm stands at the end of the layer in place of the attention's front */
    bool parallel_attention_mlp; /* both halves see the input, and their outputs are added */
    const char *name; /* copied; NULL => "layer" */
} te_transformer_layer_desc;
/* One layer of an encoder or of a decoder without cross attention. */
TE_API te_module *te_transformer_layer_create(te_ctx *te, const te_transformer_layer_desc *desc);

/* The weight gradients that te_backward left to this call in m's modules (delay_wgrad_compute), in the order in which it met them: bit for bit those
 * without the delay, where a weight has no other use in between. Between te_backward and te_optimizer_step, which warns where gradients still wait; a
 * capture that delays them has this call too. Source: transformer_engine.pytorch, backward_dw. NULL m: TE_ERR_STATE. */
TE_API te_result te_backward_dw(te_module *m);

/* Parameter: weight [num_embeddings, embedding_dim]. Forward: ids i32/i64 [..] -> [.., embedding_dim]. */
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
