/* api/nn.h: the modules that TransformerEngine has, by their names. Every desc is zero-initialised, and zero is the
 * default. Options stand in groups: api/options.h.
 *
 * Each create function returns a module with parameters initialised from the context's random state. The caller owns
 * the module until te_module_destroy, or until a parent gets it by te_module_add_child. NULL on an error:
 * TE_ERR_INVALID for sizes that do not fit, TE_ERR_DTYPE for a params_dtype other than f32, f16 and bf16, TE_ERR_STATE
 * inside a graph's capture. Creating allocates and does not sync. Inputs are f32, f16 or bf16 of any shape [.., in]
 * unless said otherwise. Under autocast the products are quantized. */

/* y = x W^T + b. Parameters: weight [out, in], bias [out]. Outputs: out[, bias].
 * Source: transformer_engine.pytorch.Linear. */
typedef struct te_linear_desc {
    int64_t in_features, out_features; /* last sizes of x and y; at least 1 */
    te_gemm_options gemm; /* of the product */
    te_parallel_options parallel; /* parallel_mode divides the product */
    te_parameters_split parameters_split; /* splits the weight into several parameters */
    bool save_original_input; /* the backward pass quantizes the input again, and no quantized copy of it is kept;
                               * refused under delayed scaling */
    const char *name; /* copied; NULL => "linear" */
} te_linear_desc;
/* Makes a Linear. Owned by the caller, or by the parent it is given to, as all modules are. NULL on an error. */
TE_API te_module *te_linear_create(te_ctx *te, const te_linear_desc *desc);

/* LayerNorm: (x - mean) / sqrt(variance + eps) * weight + bias; RMSNorm: x / sqrt(mean of squares + eps) * weight.
 * Parameters: weight [hidden], bias [hidden] (LayerNorm). Source: transformer_engine.pytorch.LayerNorm, RMSNorm. */
typedef struct te_norm_desc {
    int64_t hidden_size;   /* last size of x */
    te_norm_options norm;  /* eps and zero_centered_gamma; normalization is not read: the create function says which
                            * norm */
    te_dtype params_dtype; /* 0 => bf16. TransformerEngine's default is torch.get_default_dtype(), f32 unless the
                            * program sets another */
    te_params_device device; /* where parameters begin; 0 => on the context's device */
    te_parallel_options parallel; /* sequence_parallel alone is read here */
    const char *name;      /* copied; NULL => "layernorm", "rmsnorm" */
} te_norm_desc;
/* Makes a LayerNorm, which normalises rows by their mean and variance. */
TE_API te_module *te_layernorm_create(te_ctx *te, const te_norm_desc *desc);
/* Makes an RMSNorm, which normalises rows by their mean square. */
TE_API te_module *te_rmsnorm_create(te_ctx *te, const te_norm_desc *desc);

/* y = Linear(norm(x)). Parameters: layer_norm_weight, layer_norm_bias, weight, bias. Outputs: out[, bias][, ln_out].
 * Source: transformer_engine.pytorch.LayerNormLinear. */
typedef struct te_layernorm_linear_desc {
    int64_t in_features, out_features; /* last sizes of x and y; at least 1 */
    te_norm_options norm; /* of the norm in front */
    te_gemm_options gemm; /* of the product */
    te_parallel_options parallel; /* parallel_mode: column alone */
    te_parameters_split parameters_split; /* splits the weight into several parameters */
    bool return_layernorm_output; /* the norm's output is the output `ln_out` */
    bool return_layernorm_output_gathered; /* with sequence_parallel: `ln_out` has the rows of all ranks, and its
                                            * gradient is summed over them */
    const char *name; /* copied; NULL => "layernorm_linear" */
} te_layernorm_linear_desc;
/* Makes a LayerNormLinear: a norm whose output is quantized directly for the product behind it. */
TE_API te_module *te_layernorm_linear_create(te_ctx *te, const te_layernorm_linear_desc *desc);

/* y = act(norm(x) W1^T + b1) W2^T + b2. Parameters: layer_norm_weight, layer_norm_bias, fc1_weight, fc1_bias,
 * fc2_weight, fc2_bias. Gated activations: fc1 has 2 * ffn rows, and the first half of its output goes through the
 * nonlinearity. Outputs: out[, bias][, ln_out].
 * Source: transformer_engine.pytorch.LayerNormMLP. */
typedef struct te_layernorm_mlp_desc {
    int64_t hidden_size, ffn_hidden_size; /* last size of x and y; size between the products */
    te_activation activation;     /* 0 => GELU */
    te_activation_params activation_params; /* the numbers of the activation */
    te_norm_options norm;         /* of the norm in front */
    te_gemm_options gemm;         /* of both products; gemm.init: of fc1 alone */
    te_parallel_options parallel; /* set_parallel_mode divides fc1 by column, fc2 by row */
    te_init output_layer_init;    /* first values of fc2 */
    bool return_layernorm_output; /* the norm's output is the output `ln_out` */
    bool return_layernorm_output_gathered; /* with sequence_parallel: `ln_out` has the rows of all ranks, and its
                                            * gradient is summed over them */
    bool checkpoint;              /* norm, first product and activation run again in the backward pass, and none of
                                   * their results is kept: te_module_set_checkpoint */
    const char *name; /* copied; NULL => "layernorm_mlp" */
} te_layernorm_mlp_desc;
/* Makes a LayerNormMLP: a norm, two products and the activation between them. */
TE_API te_module *te_layernorm_mlp_create(te_ctx *te, const te_layernorm_mlp_desc *desc);

/* softmax(q k^T * scale) v. Forward: input = q [s, b, H, d], key [s, b, G, d], value [s, b, G, dv] -> [s, b, H * dv];
 * bshd likewise with b first; packed sequences q [tokens, H, d] -> [tokens, H * dv]. The call's qkv_layer or kv_layer
 * may stand in place of these. Parameter: softmax_offset f32 [H], with TE_SOFTMAX_LEARNABLE. Outputs: out[, max_logit].
 * Source: transformer_engine.pytorch.DotProductAttention. */
typedef struct te_dot_product_attention_desc {
    te_attn_options attention; /* kv_channels is needed: it has no default here */
    te_parallel_options parallel; /* tp_group shares the heads, cp_group the sequences */
    const char *name; /* copied; NULL => "core_attention" */
} te_dot_product_attention_desc;
/* Makes a DotProductAttention: the core of attention, without projections. */
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

/* Attention with its projections, of x [s, b, h], [b, s, h], or packed [tokens, h]. Children of self attention:
 * layernorm_qkv (with input_layernorm) or qkv. Children of cross attention: layernorm_query (with input_layernorm) or
 * query_layer, and key_value. Children of both: core_attention; proj; with qk_norm_type q_norm and k_norm, over each
 * head. Outputs: out[, bias][, ln_out][, max_logit].
 * Source: transformer_engine.pytorch.MultiheadAttention. */
typedef struct te_multihead_attention_desc {
    int64_t hidden_size; /* last size of x and y */
    te_attn_options attention; /* of the core */
    te_norm_options norm;         /* of the norm in front, with input_layernorm */
    te_gemm_options gemm;         /* of all projections; gemm.init: of all but proj */
    te_parallel_options parallel; /* of all children */
    te_init output_layer_init;    /* first values of proj */
    bool input_layernorm;         /* a norm stands in front of the first projection */
    bool return_layernorm_output; /* the output of that norm is the output `ln_out` */
    const char *name; /* copied; NULL => "self_attention" */
} te_multihead_attention_desc;
/* Makes a MultiheadAttention: projections to queries, keys and values, attention, and a projection back. */
TE_API te_module *te_multihead_attention_create(te_ctx *te, const te_multihead_attention_desc *desc);

/* The two kinds of layers. */
typedef enum te_layer_type {
    TE_LAYER_ENCODER = 0, /* self attention alone */
    TE_LAYER_DECODER = 1  /* self attention, and cross attention with the encoder's output */
} te_layer_type;

/* A transformer's layer: attention and MLP, each with norm, dropout and residual. Children: self_attention[,
 * inter_attention], layernorm_mlp[, layernorm].
 * Source: transformer_engine.pytorch.TransformerLayer. */
typedef struct te_transformer_layer_desc {
    int64_t hidden_size, ffn_hidden_size; /* last size of x and y; size inside the MLP */
    te_attn_options attention; /* of self attention; cross attention reads all but the mask, the window and the
                                     * diagonal */
    te_norm_options norm;      /* of all norms */
    te_gemm_options gemm;      /* of all products; return_bias is not read */
    te_parallel_options parallel; /* of all children */
    te_init output_layer_init; /* first values of the last projection of each attention and of the MLP */
    te_activation activation;  /* of the MLP; 0 => GELU */
    te_activation_params activation_params; /* the numbers of the activation */
    te_layer_type layer_type;  /* TE_LAYER_DECODER: with cross attention to encoder_output; 0 => encoder */
    te_attn_mask enc_dec_attn_mask_type; /* mask of cross attention; 0 => TE_MASK_NONE */
    te_window enc_dec_window;  /* window of cross attention; zero => none */
    te_switch enc_dec_bottom_right_diagonal; /* of cross attention, as te_attn_options.bottom_right_diagonal */
    float hidden_dropout;      /* probability; 0 => none. TransformerEngine's default is 0.1 */
    float drop_path_rate;      /* probability that an index of the input's first dimension skips self attention, or the
                                * MLP (te_drop_path); 0 => none */
    bool apply_residual_connection_post_layernorm; /* the residual is the output of the norm; false => the input of the
                                                    * norm */
    bool output_layernorm;     /* the norm stands at the end of the layer; false => in front of self attention */
    bool parallel_attention_mlp; /* attention and MLP both read the layer's input, and their outputs are added. For
                                  * encoders, without apply_residual_connection_post_layernorm and output_layernorm */
    const char *name; /* copied; NULL => "layer" */
} te_transformer_layer_desc;
/* Makes a TransformerLayer: one layer of an encoder or of a decoder. */
TE_API te_module *te_transformer_layer_create(te_ctx *te, const te_transformer_layer_desc *desc);

/* Gives a group of ranks to m and to all modules below it that were created for a tp_size of the group's size. Modules
 * that were created without a group get their first values now, from the random state as it is (with TE_PARAMS_META: at
 * te_module_reset_parameters). The group is borrowed for the modules' lifetime. TE_ERR_INVALID for a group of another
 * size or context. Source: transformer_engine.pytorch, set_tensor_parallel_group. */
TE_API te_result te_set_tensor_parallel_group(te_module *m, te_group *group);
/* Gives the ranks that share each sequence to the attention of m and of all modules below it
 * (te_parallel_options.cp_group, cp_p2p_group, cp_comm_type). The groups are borrowed for the modules' lifetime;
 * NULL => none. MultiheadAttention then rotates each token by its place in the whole sequence: it fills in cp_size and
 * cp_rank of te_rotary_desc.
 * TE_ERR_INVALID for a group of another context, or for a cp_p2p_group without TE_CP_A2A_P2P. Source:
 * transformer_engine.pytorch, set_context_parallel_group. */
TE_API te_result te_set_context_parallel_group(te_module *m, te_group *cp_group, te_group *cp_p2p_group,
                                               te_cp_comm cp_comm_type);
/* Is the gradient of this parameter one rank's part, which the caller sums over the tensor-parallel ranks
 * (te_all_reduce of te_tensor_grad) before te_optimizer_step? True for norms and for biases of row-parallel products
 * under sequence_parallel, and for norms of heads under tensor parallelism.
 * Source: the attribute sequence_parallel of parameters. */
TE_API bool te_tensor_sequence_parallel(const te_tensor *x);
/* Sets what te_tensor_sequence_parallel returns for x. Returns x. */
TE_API te_tensor *te_tensor_set_sequence_parallel(te_tensor *x, bool on);

/* Sets the recipe (copied) by which m and all modules below quantize in enabled autocast regions, in place of the
 * region's recipe; with `off` they do not quantize. For each module the nearest such call on it or above it counts.
 * recipe NULL without `off` removes the setting. Not between a forward pass and its backward pass. TE_ERR_INVALID for a
 * recipe together with `off`, or a recipe whose options exclude each other.
 * Source: the features DisableQuantizationLayer and PerTensorScaling of TransformerEngine's debug tool. */
TE_API te_result te_module_set_recipe(te_module *m, const te_recipe *recipe, bool off);

/* Computes the weight gradients that te_backward has left undone in m's modules (delay_wgrad_compute), in the order in
 * which te_backward met them. They have the bits of gradients without the delay, where a weight has no other use in
 * between. Call it between te_backward and te_optimizer_step, which warns where gradients still wait; a graph's capture
 * that delays them must contain this call too. Source: transformer_engine.pytorch, backward_dw. NULL m:
 * TE_ERR_STATE. */
TE_API te_result te_backward_dw(te_module *m);

/* A table of embeddings. Parameter: weight [num_embeddings, embedding_dim]. Forward: ids i32 or i64 [..] -> [..,
 * embedding_dim]. */
typedef struct te_embedding_desc {
    int64_t num_embeddings, embedding_dim; /* rows of the table, and columns */
    te_init init;                          /* first values of the weight; zero => N(0, 0.023^2). torch.nn.Embedding's
                                            * default is N(0, 1) */
    te_dtype params_dtype;                 /* of the weight and the output: f32, f16, bf16; 0 => bf16.
                                            * torch.nn.Embedding's default is torch.get_default_dtype() */
    te_params_device device;               /* of the weight; 0 => the context's */
    const char *name;                      /* of the module, copied; NULL => "embedding" */
} te_embedding_desc;
/* Makes an Embedding. */
TE_API te_module *te_embedding_create(te_ctx *te, const te_embedding_desc *desc);

/* Modules of one function, for te_sequential_create. None but Bias has parameters. Owned by the caller, or by the
 * parent it is given to; NULL on an error.
 * Source: transformer_engine.pytorch.ops. */
typedef struct te_activation_desc {
    te_activation activation;               /* 0 => GELU; a gated one halves the last size */
    te_activation_params activation_params; /* the numbers of the activation */
    const char *name;                       /* copied; NULL => "activation" */
} te_activation_desc;
/* Makes an Activation, which runs te_activate. */
TE_API te_module *te_activation_create(te_ctx *te, const te_activation_desc *desc);
/* Options of te_bias_create: a bias without a product. */
typedef struct te_bias_desc {
    int64_t size;            /* last size of x; at least 1 */
    te_dtype params_dtype;   /* of the bias; 0 => bf16. TransformerEngine's default is torch.get_default_dtype(), f32
                              * unless the program sets another */
    te_params_device device; /* of the bias; 0 => the context's */
    const char *name;        /* copied; NULL => "bias" */
} te_bias_desc;
/* Makes a Bias: x + bias. Parameter: bias [size], which starts at 0. */
TE_API te_module *te_bias_create(te_ctx *te, const te_bias_desc *desc);
/* Options of te_constant_scale_create. */
typedef struct te_constant_scale_desc {
    float scale;      /* the factor; it has no default: 0 multiplies by 0 */
    const char *name; /* copied; NULL => "constant_scale" */
} te_constant_scale_desc;
/* Makes a ConstantScale: scale * x. */
TE_API te_module *te_constant_scale_create(te_ctx *te, const te_constant_scale_desc *desc);
/* Options of te_dropout_create. */
typedef struct te_dropout_desc {
    float p;          /* probability of zeroing an element, 0 <= p < 1 */
    const char *name; /* copied; NULL => "dropout" */
} te_dropout_desc;
/* Makes a Dropout: te_dropout(x, p) while the module trains (te_module_train), x otherwise. */
TE_API te_module *te_dropout_create(te_ctx *te, const te_dropout_desc *desc);
/* Makes an Identity, which returns x. name: copied; NULL => "identity". */
TE_API te_module *te_identity_create(te_ctx *te, const char *name);
/* Options of te_l2normalization_create: a normalization of rows without parameters. */
typedef struct te_l2normalization_desc {
    float eps;        /* added to the sum of squares; 0 => 1e-6 */
    const char *name; /* copied; NULL => "l2normalization" */
} te_l2normalization_desc;
/* Makes an L2Normalization: x / sqrt(sum of squares + eps) of each row. */
TE_API te_module *te_l2normalization_create(te_ctx *te, const te_l2normalization_desc *desc);

/* Makes a Sequential: it runs `n` modules in order, each on the output `out` of the module before. The outputs of the
 * last module are the outputs of the Sequential. n 0: the input comes back. All other arguments of the call (mask,
 * rotary, is_first_microbatch ...) go to every child.
 *
 * Names: a child that was made with a name keeps it if the name has no dot and no other child has it
 * ("embedding.weight"). Every other child is named by its place, "0", "1", ..., counted over all children
 * ("1.self_attention.proj.bias"). te_module_add_child appends more children.
 *
 * Neighbours run as one where TransformerEngine fuses them. A norm or an Activation in front of a Linear writes its
 * output quantized (delayed and current scaling, NVFP4 without the transform). An Activation behind a Linear computes
 * the gradient of the Linear's bias and quantizes the gradient of the Linear's output. The results are those of
 * LayerNormLinear and LayerNormMLP, bit for bit, except the gradient of a Linear's output in front of an Activation: it
 * is rounded where te.ops rounds it. For a Linear without a bias, and for GELU and ReLU, its amax is taken from the f32
 * numbers before they are rounded, and under delayed scaling its codes are made from them too. For other activations
 * behind a Linear with a bias, it is rounded first. A child with a forward of its own, a checkpoint or captured graphs
 * (te_module_set_forward, te_module_set_checkpoint, te_make_graphed_callables) is not fused.
 *
 * The call takes the children: the container owns them, and they are destroyed if the container cannot be made. So they
 * may be created in the list itself.
 * Errors: TE_ERR_INVALID for a NULL child, a child of another context, one that has a parent (which keeps it) or is in
 * the list twice; TE_ERR_STATE in forward if a child before the last gives several outputs (return_bias).
 * Source: torch.nn.Sequential. */
TE_API te_module *te_sequential_create(te_ctx *te, te_module *const *children, int n);
