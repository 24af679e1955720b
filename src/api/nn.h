/* api/nn.h: the modules of TransformerEngine, under the same names. Zero-initialise every desc: zero is the default of
 * every field. api/options.h has the options that several modules share.
 *
 * Create functions initialise parameters from the context's random state. The caller owns the module until
 * te_module_destroy or te_module_add_child. Creating allocates and does not sync. NULL on an error:
 *   TE_ERR_INVALID  sizes are out of range or contradict each other
 *   TE_ERR_DTYPE    params_dtype is not f32, f16 or bf16
 *   TE_ERR_STATE    inside a graph's capture
 * Inputs are f32, f16 or bf16 of any shape [.., in]. Under autocast the operands of GEMMs are quantized. */

/* Options of te_linear_create: y = x W^T + b. Parameters: weight [out, in], bias [out]. Outputs: out[, bias].
 * Source: transformer_engine.pytorch.Linear. */
typedef struct te_linear_desc {
    int64_t in_features, out_features; /* last sizes of x and y; at least 1 */
    te_gemm_options gemm; /* options of the GEMM x W^T */
    te_parallel_options parallel; /* parallel_mode shards the weight over ranks */
    te_parameters_split parameters_split; /* splits the weight into several parameters */
    bool save_original_input; /* true => saves the input, and quantizes it again in the backward pass; false => saves a
                               * quantized copy. true is refused under delayed scaling, and for an input quantizer that
                               * rounds stochastically */
    const char *name; /* copied; NULL => "linear" */
} te_linear_desc;
/* Creates a Linear. */
TE_API te_module *te_linear_create(te_ctx *te, const te_linear_desc *desc);

/* Options of te_layernorm_create and te_rmsnorm_create (formulas: te_normalization).
 * Parameters: weight [hidden], bias [hidden] (LayerNorm). Source: transformer_engine.pytorch.LayerNorm, RMSNorm. */
typedef struct te_norm_desc {
    int64_t hidden_size;   /* last size of x */
    te_norm_options norm;  /* eps and zero_centered_gamma; `normalization` is not read */
    te_dtype params_dtype; /* 0 => bf16. TransformerEngine's default is torch.get_default_dtype() */
    te_params_device device; /* where parameters are allocated; 0 => the context's device */
    te_parallel_options parallel; /* only sequence_parallel is read here */
    const char *name;      /* copied; NULL => "layernorm", "rmsnorm" */
} te_norm_desc;
/* Creates a LayerNorm, which normalises each row by mean and variance. */
TE_API te_module *te_layernorm_create(te_ctx *te, const te_norm_desc *desc);
/* Creates an RMSNorm, which normalises each row by its mean square. */
TE_API te_module *te_rmsnorm_create(te_ctx *te, const te_norm_desc *desc);

/* Options of te_layernorm_linear_create: y = Linear(norm(x)). Parameters: layer_norm_weight, layer_norm_bias, weight,
 * bias. Outputs: out[, bias][, ln_out].
 * Source: transformer_engine.pytorch.LayerNormLinear. */
typedef struct te_layernorm_linear_desc {
    int64_t in_features, out_features; /* last sizes of x and y; at least 1 */
    te_norm_options norm; /* options of the norm in front */
    te_gemm_options gemm; /* options of the GEMM */
    te_parallel_options parallel; /* parallel_mode: only TE_PARALLEL_COLUMN is possible */
    te_parameters_split parameters_split; /* splits the weight into several parameters */
    bool return_layernorm_output; /* the norm's output is the output `ln_out` */
    bool return_layernorm_output_gathered; /* with sequence_parallel: `ln_out` has the rows of all ranks; its gradient
                                            * is summed over the ranks */
    const char *name; /* copied; NULL => "layernorm_linear" */
} te_layernorm_linear_desc;
/* Creates a LayerNormLinear: a norm and a Linear behind it. The norm writes its output quantized for the GEMM. */
TE_API te_module *te_layernorm_linear_create(te_ctx *te, const te_layernorm_linear_desc *desc);

/* Options of te_layernorm_mlp_create: y = act(norm(x) W1^T + b1) W2^T + b2. Parameters: layer_norm_weight,
 * layer_norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias. A gated activation has 2 * ffn_hidden_size rows in
 * fc1_weight; the nonlinearity takes the first half. Outputs: out[, bias][, ln_out].
 * Source: transformer_engine.pytorch.LayerNormMLP. */
typedef struct te_layernorm_mlp_desc {
    int64_t hidden_size, ffn_hidden_size; /* hidden_size: last size of x, and of y. ffn_hidden_size: last size of the
                                           * activation's result */
    te_activation activation;     /* 0 => GELU */
    te_activation_params activation_params; /* parameters of the activation */
    te_norm_options norm;         /* options of the norm in front */
    te_gemm_options gemm;         /* options of fc1 and fc2; gemm.init is read for fc1 only */
    te_parallel_options parallel; /* set_parallel_mode shards fc1 by column, fc2 by row */
    te_init output_layer_init;    /* initial values of fc2 */
    bool return_layernorm_output; /* the norm's output is the output `ln_out` */
    bool return_layernorm_output_gathered; /* with sequence_parallel: `ln_out` has the rows of all ranks; its gradient
                                            * is summed over the ranks */
    bool checkpoint;              /* true => the backward pass recomputes norm, fc1 and activation (as
                                   * te_module_set_checkpoint) */
    const char *name; /* copied; NULL => "layernorm_mlp" */
} te_layernorm_mlp_desc;
/* Creates a LayerNormMLP: a norm, fc1, an activation and fc2. */
TE_API te_module *te_layernorm_mlp_create(te_ctx *te, const te_layernorm_mlp_desc *desc);

/* Options of te_dot_product_attention_create: softmax(q k^T * scale) v.
 * `input` (q) is [s, b, H, d], `key` [s, b, G, d], `value` [s, b, G, dv], the output [s, b, H * dv].
 * TE_BSHD exchanges s and b. Packed sequences have [tokens, ..] instead of [s, b, ..].
 * Parameter: softmax_offset f32 [H], with TE_SOFTMAX_LEARNABLE. Outputs: out[, max_logit].
 * Source: transformer_engine.pytorch.DotProductAttention. */
typedef struct te_dot_product_attention_desc {
    te_attn_options attention; /* kv_channels is needed: it has no default here */
    te_parallel_options parallel; /* with tp_group each rank has some of the heads; with cp_group each rank has some
                                   * chunks of each sequence */
    const char *name; /* copied; NULL => "core_attention" */
} te_dot_product_attention_desc;
/* Creates a DotProductAttention, the core of attention without projections. */
TE_API te_module *te_dot_product_attention_create(te_ctx *te, const te_dot_product_attention_desc *desc);

/* Options of te_sdpa_create. An SDPA is the attention core `sdpa` of a language model: te_attention without packed
 * tensors, caches and FP8. te_module_set_forward can replace its forward. te_module_state returns this desc. The
 * forward reads args->input (the query, [s, b, H, d]), args->key and args->value ([s_kv, b, G, d]). It sets
 * args->outputs.out [s, b, H, d]. Of args->attention only attn_mask_type, window, checkpoint_core_attention and, with a
 * padding mask, cu_seqlens_q and cu_seqlens_kv may be set. In models of te_causal_lm_create, attn_mask_type is
 * TE_MASK_CAUSAL. If args->key also has keys of earlier calls (te_kv_cache), it is TE_MASK_CAUSAL_BOTTOM_RIGHT. For a
 * few new tokens, and in a capture, an SDPA without a forward of its own gets all positions of the cache in args->key
 * and args->value, TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT, and the lengths. */
typedef struct te_sdpa_desc {
    te_qkv_format format; /* layout of query, key, value and output; 0 => [s, b, H, d] */
    te_attn_rule rule;    /* only these fields may be set: mask, window, softmax_scale, softcap, dropout_p (in
                           * training), softmax_type, softmax_offset (borrowed for the module's lifetime,
                           * differentiable). The mask and window of a call override those of `rule` */
    const char *name;     /* copied; NULL => "sdpa" */
} te_sdpa_desc;
/* Creates an SDPA, which has no parameters. NULL with TE_ERR_INVALID for values out of range, TE_ERR_UNSUPPORTED if
 * `rule` sets other fields. */
TE_API te_module *te_sdpa_create(te_ctx *te, const te_sdpa_desc *desc);

/* Options of te_multihead_attention_create. The input x is [s, b, h], [b, s, h], or packed [tokens, h]. Outputs: out[,
 * bias][, ln_out][, max_logit]. Children:
 *   self attention   layernorm_qkv (with input_layernorm) or qkv
 *   cross attention  layernorm_query (with input_layernorm) or query_layer; key_value
 *   both             core_attention; proj; q_norm and k_norm (with qk_norm_type), which normalise each head
 * Source: transformer_engine.pytorch.MultiheadAttention. */
typedef struct te_multihead_attention_desc {
    int64_t hidden_size; /* last size of x and y */
    te_attn_options attention; /* options of core_attention */
    te_norm_options norm;         /* options of the norm in front, read with input_layernorm */
    te_gemm_options gemm;         /* options of all projections; gemm.init is not read for proj */
    te_parallel_options parallel; /* options of all children */
    te_init output_layer_init;    /* initial values of proj */
    bool input_layernorm;         /* a norm runs before the first projection */
    bool return_layernorm_output; /* the norm's output is the output `ln_out` */
    const char *name; /* copied; NULL => "self_attention" */
} te_multihead_attention_desc;
/* Creates a MultiheadAttention, which projects to queries, keys and values, computes attention, and projects the
 * result. */
TE_API te_module *te_multihead_attention_create(te_ctx *te, const te_multihead_attention_desc *desc);

/* The two kinds of transformer layers. */
typedef enum te_layer_type {
    TE_LAYER_ENCODER = 0, /* self attention alone */
    TE_LAYER_DECODER = 1  /* self attention, and cross attention with the encoder's output */
} te_layer_type;

/* Options of te_transformer_layer_create. A layer has attention and an MLP, each with norm, dropout and residual.
 * Children: self_attention[, inter_attention], layernorm_mlp[, layernorm].
 * Source: transformer_engine.pytorch.TransformerLayer. */
typedef struct te_transformer_layer_desc {
    int64_t hidden_size, ffn_hidden_size; /* last size of x and y; inner size of the MLP */
    te_attn_options attention; /* options of self attention, and of cross attention except mask, window and
                                * bottom_right_diagonal */
    te_norm_options norm;      /* options of all norms */
    te_gemm_options gemm;      /* options of all GEMMs with weights; return_bias is not read */
    te_parallel_options parallel; /* options of all children */
    te_init output_layer_init; /* initial values of the last projection of each attention and of the MLP */
    te_activation activation;  /* activation of the MLP; 0 => GELU */
    te_activation_params activation_params; /* parameters of the activation */
    te_layer_type layer_type;  /* TE_LAYER_DECODER => the layer has cross attention to encoder_output; 0 => encoder */
    te_attn_mask enc_dec_attn_mask_type; /* mask of cross attention; 0 => TE_MASK_NONE */
    te_window enc_dec_window;  /* window of cross attention; zero => none */
    te_switch enc_dec_bottom_right_diagonal; /* as te_attn_options.bottom_right_diagonal, for cross attention */
    float hidden_dropout;      /* probability of dropout; 0 => none. TransformerEngine's default is 0.1 */
    float drop_path_rate;      /* probability that self attention, or the MLP, is skipped (te_drop_path); 0 => never */
    bool apply_residual_connection_post_layernorm; /* true => the residual is the output of the norm; false => the input
                                                    * of the norm */
    bool output_layernorm;     /* true => a norm at the end of the layer, none before self attention; false => the
                                * opposite */
    bool parallel_attention_mlp; /* true => attention and MLP both read the layer's input; their outputs are added. Only
                                  * for encoders, without apply_residual_connection_post_layernorm and
                                  * output_layernorm */
    const char *name; /* copied; NULL => "layer" */
} te_transformer_layer_desc;
/* Creates a TransformerLayer: one layer of an encoder or of a decoder. */
TE_API te_module *te_transformer_layer_create(te_ctx *te, const te_transformer_layer_desc *desc);

/* Sets `group` as the tensor-parallel group of all modules in m's tree that are split over ranks (tp_size above 1).
 * Modules created without a group are initialised now (with TE_PARAMS_META: at te_module_reset_parameters). The group
 * is borrowed for the modules' lifetime. TE_ERR_INVALID if the tp_size of such a module is not the group's size, and
 * for a group of another context. Source: transformer_engine.pytorch, set_tensor_parallel_group. */
TE_API te_result te_set_tensor_parallel_group(te_module *m, te_group *group);
/* Sets cp_group, cp_p2p_group and cp_comm_type (te_parallel_options) of all attention in m and below it. The groups are
 * borrowed for the modules' lifetime; NULL => none. MultiheadAttention then sets cp_size and cp_rank of te_rotary_desc.
 * TE_ERR_INVALID for a group of another context, or for a cp_p2p_group without TE_CP_A2A_P2P.
 * Source: transformer_engine.pytorch, set_context_parallel_group. */
TE_API te_result te_set_context_parallel_group(te_module *m, te_group *cp_group, te_group *cp_p2p_group,
                                               te_cp_comm cp_comm_type);
/* Returns true if te_tensor_grad(x) must be summed over the tensor-parallel ranks (te_all_reduce) before
 * te_optimizer_step. With tp_size above 1 it is true for the parameters of q_norm and k_norm. Under sequence_parallel
 * it is also true for those of other norms, and for the biases of row-parallel modules. Source: the attribute
 * sequence_parallel of parameters. */
TE_API bool te_tensor_sequence_parallel(const te_tensor *x);
/* Sets what te_tensor_sequence_parallel returns for x. Returns x. */
TE_API te_tensor *te_tensor_set_sequence_parallel(te_tensor *x, bool on);

/* Gives m and all modules below m a recipe of their own (copied). In enabled autocast regions these modules use this
 * recipe in place of the region's recipe. With `off` they do not quantize. A module's setting overrides the settings of
 * modules above it. `recipe` NULL without `off` removes the setting. Do not call this between a forward pass and its
 * backward pass. TE_ERR_INVALID for a recipe together with `off`, or a recipe whose options exclude each other.
 * Source: the features DisableQuantizationLayer and PerTensorScaling of TransformerEngine's debug tool. */
TE_API te_result te_module_set_recipe(te_module *m, const te_recipe *recipe, bool off);

/* Computes the weight gradients that te_backward has deferred in m and the modules below (delay_wgrad_compute). Call it
 * before te_optimizer_step. If te_backward was called inside a graph's capture, call te_backward_dw inside the same
 * capture. The delay changes no bit, unless another use of the weight adds to its gradient in between. TE_ERR_STATE for
 * NULL. Source: transformer_engine.pytorch, backward_dw. */
TE_API te_result te_backward_dw(te_module *m);

/* Options of te_embedding_create. Parameter: weight [num_embeddings, embedding_dim]. Forward: ids i32 or i64 [..] ->
 * [.., embedding_dim].
 *
 * Ranks of parallel.tp_group share the rows (megatron.core VocabParallelEmbedding): they divide num_embeddings, and
 * `weight` is [num_embeddings / size, embedding_dim]. All of them call with the same ids, and sum what they look up;
 * with sequence_parallel each gets its part of the first dimension, which they divide (reduce_scatter_embeddings). */
typedef struct te_embedding_desc {
    int64_t num_embeddings, embedding_dim; /* number of rows and of columns of the table */
    te_init init;                          /* initial values of the weight; 0 => N(0, 0.023^2). torch.nn.Embedding's
                                            * default is N(0, 1) */
    te_dtype params_dtype;                 /* format of the weight and the output: f32, f16 or bf16; 0 => bf16.
                                            * torch.nn.Embedding's default is torch.get_default_dtype() */
    te_params_device device;               /* where the weight is allocated; 0 => the context's device */
    te_parallel_options parallel;          /* only tp_group, tp_size and sequence_parallel are read here */
    const char *name;                      /* copied; NULL => "embedding" */
} te_embedding_desc;
/* Creates an Embedding, which looks up rows of a table. */
TE_API te_module *te_embedding_create(te_ctx *te, const te_embedding_desc *desc);

/* Options of te_activation_create. Source of the modules from here to L2Normalization:
 * transformer_engine.pytorch.ops. */
typedef struct te_activation_desc {
    te_activation activation;               /* 0 => GELU; a gated one halves the last size */
    te_activation_params activation_params; /* parameters of the activation */
    const char *name;                       /* copied; NULL => "activation" */
} te_activation_desc;
/* Creates an Activation, which runs te_activate. */
TE_API te_module *te_activation_create(te_ctx *te, const te_activation_desc *desc);
/* Options of te_bias_create: a module that only adds a bias. */
typedef struct te_bias_desc {
    int64_t size;            /* last size of x; at least 1 */
    te_dtype params_dtype;   /* format of the bias; 0 => bf16. TransformerEngine's default is
                              * torch.get_default_dtype() */
    te_params_device device; /* where the bias is allocated; 0 => the context's device */
    const char *name;        /* copied; NULL => "bias" */
} te_bias_desc;
/* Creates a Bias: x + bias. Parameter: bias [size], which starts at 0. */
TE_API te_module *te_bias_create(te_ctx *te, const te_bias_desc *desc);
/* Options of te_constant_scale_create. */
typedef struct te_constant_scale_desc {
    float scale;      /* the factor. It has no default: with 0 the result is 0 */
    const char *name; /* copied; NULL => "constant_scale" */
} te_constant_scale_desc;
/* Creates a ConstantScale: scale * x. */
TE_API te_module *te_constant_scale_create(te_ctx *te, const te_constant_scale_desc *desc);
/* Options of te_dropout_create. */
typedef struct te_dropout_desc {
    float p;          /* probability of zeroing an element, 0 <= p < 1 */
    const char *name; /* copied; NULL => "dropout" */
} te_dropout_desc;
/* Creates a Dropout: te_dropout(x, p) while the module trains (te_module_train), x otherwise. */
TE_API te_module *te_dropout_create(te_ctx *te, const te_dropout_desc *desc);
/* Creates an Identity, which returns x. name: copied; NULL => "identity". */
TE_API te_module *te_identity_create(te_ctx *te, const char *name);
/* Options of te_l2normalization_create: a normalization of rows without parameters. */
typedef struct te_l2normalization_desc {
    float eps;        /* added to the sum of squares; 0 => 1e-6 */
    const char *name; /* copied; NULL => "l2normalization" */
} te_l2normalization_desc;
/* Creates an L2Normalization: x / sqrt(sum of squares + eps) of each row. */
TE_API te_module *te_l2normalization_create(te_ctx *te, const te_l2normalization_desc *desc);

/* Creates a Sequential of `n` modules. Each module reads the output `out` of the module before. The outputs of the last
 * module are those of the Sequential. With n 0 the output is the input. All other arguments of the call (mask, rotary,
 * is_first_microbatch ...) go to every child.
 *
 * Names. A child that was made with a name keeps it, if the name has no dot and no other child has it (parameter
 * "embedding.weight"). Every other child is named by its index among all children (parameter
 * "1.self_attention.proj.bias"). te_module_add_child appends children.
 *
 * Fusion. Neighbouring children are fused where TransformerEngine fuses them. A norm or an Activation in front of a
 * Linear writes its output quantized (delayed and current scaling, NVFP4 without the Hadamard transform). An Activation
 * behind a Linear computes the gradient of the Linear's bias and quantizes the gradient of the Linear's output. A child
 * with te_module_set_forward, te_module_set_checkpoint or te_make_graphed_callables is not fused.
 *
 * Results of fused children are bit-identical to those of LayerNormLinear and LayerNormMLP, with one exception. If a
 * Linear is in front of an Activation, the gradient g of the Linear's output is rounded as in TransformerEngine's
 * te.ops. If the Linear has no bias, or the activation is GELU or ReLU, the amax of g is computed from f32 values.
 * Under delayed scaling, the codes of g are then computed from f32 values, too. In all other cases g is rounded before
 * its amax and codes are computed.
 *
 * The Sequential takes ownership of the children; if it cannot be created, it destroys them.
 * TE_ERR_INVALID for a child that is NULL, is of another context, is twice in the list, or has a parent already (which
 * keeps the child).
 * In forward: TE_ERR_STATE if a child before the last has several outputs (return_bias).
 * Source: torch.nn.Sequential. */
TE_API te_module *te_sequential_create(te_ctx *te, te_module *const *children, int n);
