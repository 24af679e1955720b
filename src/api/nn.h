/* api/nn.h: the modules that TransformerEngine has, by their names. Every desc is zero-initialised, and zero is the
 * default.
 *
 * Options stand in groups: api/options.h.
 *
 * Each create function returns a module that the caller owns (te_module_destroy, or a parent by te_module_add_child),
 * with its parameters initialised from the context's random state, or NULL: TE_ERR_INVALID for sizes that do not fit,
 * TE_ERR_DTYPE for a params_dtype other than f32, f16 and bf16, TE_ERR_STATE inside a graph's capture. It allocates and
 * does not sync. Inputs are f32, f16 or bf16 of any shape [.., in] unless said otherwise. Under autocast the products
 * are quantized. */

/* y = x W^T + b. Parameters: weight [out, in], bias [out]. Outputs: out[, bias].
 * Source: transformer_engine.pytorch.Linear. */
typedef struct te_linear_desc {
    int64_t in_features, out_features; /* last sizes of x and y; at least 1 */
    te_gemm_options gemm; /* of the product */
    te_parallel_options parallel; /* parallel_mode is the product's */
    te_parameters_split parameters_split; /* the weight in several parameters */
    bool save_original_input; /* the backward pass quantizes the input again in place of keeping a quantized copy;
                               * refused under delayed scaling */
    const char *name; /* copied; NULL => "linear" */
} te_linear_desc;
/* Owned by the caller, or by the parent it is given to, as all modules are. NULL on an error. */
TE_API te_module *te_linear_create(te_ctx *te, const te_linear_desc *desc);

/* LayerNorm: (x - mean) / sqrt(variance + eps) * weight + bias; RMSNorm: x / sqrt(mean of squares + eps) * weight.
 * Parameters: weight [hidden], bias [hidden] (LayerNorm). Source: transformer_engine.pytorch.LayerNorm, RMSNorm. */
typedef struct te_norm_desc {
    int64_t hidden_size;   /* last size of x */
    te_norm_options norm;  /* normalization is the create function's */
    te_dtype params_dtype; /* 0 => bf16 */
    te_params_device device; /* of parameters; 0 => the context's */
    te_parallel_options parallel; /* sequence_parallel alone has a meaning here */
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
    te_parallel_options parallel; /* parallel_mode: column alone */
    te_parameters_split parameters_split; /* the weight in several parameters */
    bool return_layernorm_output; /* the norm's output is the output `ln_out` */
    bool return_layernorm_output_gathered; /* of all ranks, with sequence_parallel; its gradient is added up over
                                            * them */
    const char *name; /* copied; NULL => "layernorm_linear" */
} te_layernorm_linear_desc;
/* A norm and the product behind it, which quantizes what the norm makes. */
TE_API te_module *te_layernorm_linear_create(te_ctx *te, const te_layernorm_linear_desc *desc);

/* y = act(norm(x) W1^T + b1) W2^T + b2. Parameters: layer_norm_weight, layer_norm_bias, fc1_weight, fc1_bias,
 * fc2_weight, fc2_bias. Gated activations: fc1 has 2 * ffn rows, the first half goes through the nonlinearity. Outputs:
 * out[, bias][, ln_out].
 * Source: transformer_engine.pytorch.LayerNormMLP. */
typedef struct te_layernorm_mlp_desc {
    int64_t hidden_size, ffn_hidden_size; /* last sizes of x and y, and between the products */
    te_activation activation;     /* 0 => GELU */
    te_activation_params activation_params; /* its numbers */
    te_norm_options norm;
    te_gemm_options gemm;         /* init: of fc1 */
    te_parallel_options parallel; /* set_parallel_mode: fc1 by column, fc2 by row */
    te_init output_layer_init;    /* of fc2 */
    bool return_layernorm_output; /* the norm's output is the output `ln_out` */
    bool return_layernorm_output_gathered; /* of all ranks, with sequence_parallel; its gradient is added up over
                                            * them */
    bool checkpoint;              /* norm, first product and activation run again in the backward pass, and none of
                                   * their results is kept: te_module_set_checkpoint */
    const char *name; /* copied; NULL => "layernorm_mlp" */
} te_layernorm_mlp_desc;
/* A norm, two products and the activation between them. */
TE_API te_module *te_layernorm_mlp_create(te_ctx *te, const te_layernorm_mlp_desc *desc);

/* softmax(q k^T * scale) v. Forward: input = q [s, b, H, d], key [s, b, G, d], value [s, b, G, dv] -> [s, b, H * dv];
 * bshd likewise, and of packed sequences q [tokens, H, d] -> [tokens, H * dv]; or packed tensors of the call
 * (qkv_layer, kv_layer). Parameter: softmax_offset f32 [H], of TE_SOFTMAX_LEARNABLE. Outputs: out[, max_logit].
 * Source: transformer_engine.pytorch.DotProductAttention. */
typedef struct te_dot_product_attention_desc {
    te_attention_options attention; /* kv_channels has no default here */
    te_parallel_options parallel; /* of the core: heads, and the context's ranks */
    const char *name; /* copied; NULL => "core_attention" */
} te_dot_product_attention_desc;
/* The attention core. */
TE_API te_module *te_dot_product_attention_create(te_ctx *te, const te_dot_product_attention_desc *desc);

/* The core as models that exist have it, their child `sdpa`: te_attention by a rule, without DotProductAttention's
 * packed tensors, caches, lengths and FP8. Another attention takes its place by te_module_set_forward. Its forward gets
 * the query in args->input [s, b, H, d], args->key and args->value [s_kv, b, G, d], or as `format` says, and makes
 * args->outputs.out [s, b, H, d] likewise. args->attention may have attn_mask_type, window and
 * checkpoint_core_attention; in a model of te_causal_lm_create the first is TE_MASK_CAUSAL, or, where keys of earlier
 * calls are there, TE_MASK_CAUSAL_BOTTOM_RIGHT. The rest is this desc, which te_module_state gives. */
typedef struct te_sdpa_desc {
    te_qkv_format format; /* of query, key, value and output; 0 => [s, b, H, d] */
    te_attn_rule rule;    /* mask and window (where a call gives none), softmax_scale, softcap, dropout_p (in training),
                           * softmax_type and softmax_offset: f32 [H], attention sinks with TE_SOFTMAX_LEARNABLE
                           * (borrowed for the module's lifetime, differentiable). Its other fields stay 0 */
    const char *name;     /* copied; NULL => "sdpa" */
} te_sdpa_desc;
/* A module of that class, without parameters. NULL: TE_ERR_INVALID for a softcap that is negative, infinite or NaN, for
 * a softmax_offset that does not go with softmax_type, and for numbers that are not possible; TE_ERR_UNSUPPORTED for
 * fields of the rule that it does not read. */
TE_API te_module *te_sdpa_create(te_ctx *te, const te_sdpa_desc *desc);

/* Attention with its projections, of x [s, b, h], [b, s, h], or packed [tokens, h]. Children: layernorm_qkv (with
 * input_layernorm) or qkv, of cross attention layernorm_query or query_layer, and key_value; core_attention; proj; with
 * qk_norm_type q_norm and k_norm, over each head. Outputs: out[, bias][, ln_out][, max_logit].
 * Source: transformer_engine.pytorch.MultiheadAttention. */
typedef struct te_multihead_attention_desc {
    int64_t hidden_size; /* last size of x and y */
    te_attention_options attention; /* of the core */
    te_norm_options norm;         /* with input_layernorm */
    te_gemm_options gemm;         /* init: of the first projection */
    te_parallel_options parallel; /* of all children */
    te_init output_layer_init;    /* of proj */
    bool input_layernorm;         /* a norm in front */
    bool return_layernorm_output; /* its output is the output `ln_out` */
    const char *name; /* copied; NULL => "self_attention" */
} te_multihead_attention_desc;
/* Projections to queries, keys and values, attention, and a projection back. */
TE_API te_module *te_multihead_attention_create(te_ctx *te, const te_multihead_attention_desc *desc);

/* The two kinds of layers. */
typedef enum te_layer_type {
    TE_LAYER_ENCODER = 0, /* self attention alone */
    TE_LAYER_DECODER = 1  /* and cross attention with the encoder's output */
} te_layer_type;

/* A transformer's layer: attention and MLP, each with norm, dropout and residual. Children: self_attention[,
 * inter_attention], layernorm_mlp[, layernorm].
 * Source: transformer_engine.pytorch.TransformerLayer. */
typedef struct te_transformer_layer_desc {
    int64_t hidden_size, ffn_hidden_size; /* last sizes of x and y, and inside the MLP */
    te_attention_options attention; /* of the core */
    te_norm_options norm;
    te_gemm_options gemm;      /* return_bias has no meaning here */
    te_parallel_options parallel; /* of all children */
    te_init output_layer_init; /* of the second projection of each half */
    te_activation activation;  /* 0 => GELU */
    te_activation_params activation_params; /* its numbers */
    te_layer_type layer_type;  /* a decoder has cross attention with encoder_output */
    te_attn_mask enc_dec_attn_mask_type; /* of cross attention; 0 => none */
    te_window enc_dec_window;  /* of cross attention */
    te_switch enc_dec_bottom_right_diagonal; /* of cross attention; 0 => by the mask, as of bottom_right_diagonal */
    float hidden_dropout;      /* 0 => none (TransformerEngine's own default is 0.1) */
    float drop_path_rate;      /* probability that an index of the input's first dimension skips self attention, or the
                                * MLP (te_drop_path); 0 => none */
    bool apply_residual_connection_post_layernorm; /* residuals begin at the norms' outputs */
    bool output_layernorm;     /* the norm stands at the end of the layer in place of the attention's front */
    bool parallel_attention_mlp; /* both halves see the input, and their outputs are added; in an encoder, without the
                                  * two above */
    const char *name; /* copied; NULL => "layer" */
} te_transformer_layer_desc;
/* One layer of an encoder or of a decoder. */
TE_API te_module *te_transformer_layer_create(te_ctx *te, const te_transformer_layer_desc *desc);

/* Gives a group of ranks to m and to all modules below whose work is to be shared by as many (tp_size). Those that were
 * created without one get their first values now, from the random state as it is (with TE_PARAMS_META: at
 * te_module_reset_parameters). The group is borrowed for the modules' lifetime. TE_ERR_INVALID for a group of another
 * size or context. Source: transformer_engine.pytorch, set_tensor_parallel_group. */
TE_API te_result te_set_tensor_parallel_group(te_module *m, te_group *group);
/* Gives the ranks that share each sequence to the attention of m and of all modules below it
 * (te_parallel_options.cp_group, cp_p2p_group, cp_comm_type). The groups are borrowed for the modules' lifetime; NULL
 * => none. MultiheadAttention then rotates each token by its place in the whole sequence, as cp_size and cp_rank of
 * te_rotary_desc say, which it fills in.
 * TE_ERR_INVALID for a group of another context, or for cp_p2p_group with another kind than TE_CP_A2A_P2P. Source:
 * transformer_engine.pytorch, set_context_parallel_group. */
TE_API te_result te_set_context_parallel_group(te_module *m, te_group *cp_group, te_group *cp_p2p_group,
                                               te_cp_comm cp_comm_type);
/* Is the gradient of this parameter one rank's part, to be added up over the tensor-parallel ranks by the caller
 * (te_all_reduce of te_tensor_grad) before te_optimizer_step?
 * So it is of norms and of biases by row under sequence_parallel, and of norms of heads under tensor parallelism.
 * Source: the attribute sequence_parallel of parameters. */
TE_API bool te_tensor_sequence_parallel(const te_tensor *x);
/* Sets that attribute. Returns x. */
TE_API te_tensor *te_tensor_set_sequence_parallel(te_tensor *x, bool on);

/* In enabled autocast regions m and all modules below quantize by `recipe` (copied) in place of the region's, or, with
 * `off`, not at all; the nearest such call above a module counts.
 * NULL without `off` takes it away. Not between a forward pass and its backward pass. TE_ERR_INVALID for both, or a
 * recipe whose options exclude each other.
 * Source: the features DisableQuantizationLayer and PerTensorScaling of TransformerEngine's debug tool. */
TE_API te_result te_module_set_recipe(te_module *m, const te_recipe *recipe, bool off);

/* The weight gradients that te_backward left to this call in m's modules (delay_wgrad_compute), in the order in which
 * it met them: bit for bit those without the delay, where a weight has no other use in between. Between te_backward and
 * te_optimizer_step, which warns where gradients still wait; a capture that delays them has this call too. Source:
 * transformer_engine.pytorch, backward_dw. NULL m: TE_ERR_STATE. */
TE_API te_result te_backward_dw(te_module *m);

/* Parameter: weight [num_embeddings, embedding_dim]. Forward: ids i32/i64 [..] -> [.., embedding_dim]. */
typedef struct te_embedding_desc {
    int64_t num_embeddings, embedding_dim; /* rows of the table, and their size */
    te_init init;                          /* of the weight */
    te_dtype params_dtype;                 /* of the weight and the output: f32, f16, bf16; 0 => bf16 */
    te_params_device device;               /* of the weight; 0 => the context's */
    const char *name;                      /* of the module, copied; NULL => "embedding" */
} te_embedding_desc;
/* An Embedding module. */
TE_API te_module *te_embedding_create(te_ctx *te, const te_embedding_desc *desc);

/* Modules of one function, for te_sequential_create. None but Bias has parameters. Owned by the caller, or by the
 * parent it is given to; NULL on an error.
 * Source: transformer_engine.pytorch.ops. */
typedef struct te_activation_desc {
    te_activation activation;               /* 0 => GELU; a gated one halves the last size */
    te_activation_params activation_params; /* its numbers */
    const char *name;                       /* copied; NULL => "activation" */
} te_activation_desc;
/* te_activate. */
TE_API te_module *te_activation_create(te_ctx *te, const te_activation_desc *desc);
/* A bias without a product. */
typedef struct te_bias_desc {
    int64_t size;            /* last size of x; at least 1 */
    te_dtype params_dtype;   /* of the bias; 0 => bf16 */
    te_params_device device; /* of the bias; 0 => the context's */
    const char *name;        /* copied; NULL => "bias" */
} te_bias_desc;
/* x + bias. Parameter: bias [size], 0 at first. */
TE_API te_module *te_bias_create(te_ctx *te, const te_bias_desc *desc);
/* A factor. */
typedef struct te_constant_scale_desc {
    float scale;      /* the factor, as it is: 0 is 0 */
    const char *name; /* copied; NULL => "constant_scale" */
} te_constant_scale_desc;
/* scale * x. */
TE_API te_module *te_constant_scale_create(te_ctx *te, const te_constant_scale_desc *desc);
/* A dropout. */
typedef struct te_dropout_desc {
    float p;          /* probability of zeroing an element, 0 <= p < 1 */
    const char *name; /* copied; NULL => "dropout" */
} te_dropout_desc;
/* te_dropout while the module trains (te_module_train); x otherwise. */
TE_API te_module *te_dropout_create(te_ctx *te, const te_dropout_desc *desc);
/* x. name: copied; NULL => "identity". */
TE_API te_module *te_identity_create(te_ctx *te, const char *name);
/* A normalization of rows without parameters. */
typedef struct te_l2normalization_desc {
    float eps;        /* added to the sum of squares; 0 => 1e-6 */
    const char *name; /* copied; NULL => "l2normalization" */
} te_l2normalization_desc;
/* x / sqrt(sum of squares + eps) of each row. */
TE_API te_module *te_l2normalization_create(te_ctx *te, const te_l2normalization_desc *desc);

/* A module that runs `n` modules in order, each on the first output of the one before; the last one's outputs are its
 * own. n 0: the input comes back.
 * The rest of the call (mask, rotary, is_first_microbatch ...) goes to every child. A child that was made with a name
 * keeps it, if it has no dot and no other child has it, too:
 * "embedding.weight". All others are named "0", "1", ... by their place, whatever stands before them:
 * "1.self_attention.proj.bias". te_module_add_child appends more.
 *
 * Neighbours run as one where TransformerEngine fuses them: a norm or an Activation in front of a Linear leaves
 * quantized what that multiplies (delayed and current scaling, NVFP4 without the transform), and an Activation behind a
 * Linear makes the gradient of its bias and quantizes that of its output, as LayerNormLinear and LayerNormMLP do, bit
 * for bit; but without a bias, and behind GELU and ReLU with one, te.ops' kernels round that gradient later: its amax,
 * and under delayed scaling its codes, are those of the f32 numbers, and of other activations behind a bias those of
 * rounded ones. A child with a forward of its own, a checkpoint or captured graphs (te_module_set_forward,
 * te_module_set_checkpoint, te_make_graphed_callables) stays by itself.
 *
 * The call takes the children: the container owns them, and they are destroyed if it cannot be made, so they may be
 * created in the list itself.
 * Errors: TE_ERR_INVALID for a NULL child, one of another context, one that has a parent (which keeps it) or is in the
 * list twice; TE_ERR_STATE in forward if a child before the last gives several outputs (return_bias).
 * Source: torch.nn.Sequential. */
TE_API te_module *te_sequential_create(te_ctx *te, te_module *const *children, int n);
