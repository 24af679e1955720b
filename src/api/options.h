/* api/options.h: groups of options that several modules have. A module hands them to its children unchanged. Names are
 * TransformerEngine's. Zero is the default; a comment says where TransformerEngine's default differs.
 *
 * These options of TransformerEngine have no field here:
 *   get_rng_state_tracker              The context keeps its random states (te_rng_tracker_add). rng_tracker_name
 *                                      selects one.
 *   ub_name, ub_tp_comm_overlap        te.h overlaps by collectives of the group, and has no userbuffers to set up.
 *                                      Each ub_ option of te_parallel_options turns itself on.
 *   cp_stream                          The context manages its streams itself.
 *   cp_global_ranks                    te_send and te_recv take the ranks of the group.
 *   layer_number                       te_module_path names a module. te.h has no scaling by the layer number
 *                                      (NVTE_APPLY_QK_LAYER_SCALING).
 *   seq_length, micro_batch_size       TransformerEngine warms up TorchScript with them. te_warmup takes a shape.
 *   qkv_format of InferenceParams      The module's qkv_format holds for all its calls.
 *   qkv_format of a forward call       The module's qkv_format holds for all its calls.
 *   custom_cache_manager               A program can replace the attention function by te_module_set_forward.
 *   fast_zero_fill, num_splits         They change only the speed. The kernels choose them.
 *   kv_channels as a pair              DotProductAttention takes the head size of values from the tensor `value`.
 *   hidden_size as a tuple             te_tensor_view can join several dimensions to one.
 *   attention_softmax_in_fp32          TransformerEngine has removed it.
 *   apply_query_key_layer_scaling      TransformerEngine has removed it.
 *   skip_weight_param_allocation       TransformerEngine has removed it.
 *   weight and bias of forward         TransformerEngine has removed them. */

/* How weights are initialised. Biases begin at 0, norms as the identity. */
typedef struct te_init {
    float std;    /* standard deviation of N(0, std^2); 0 => 0.023 */
    bool no_init; /* leave the weights uninitialised (a checkpoint will be loaded) */
    /* Fills `weight` [out, in], a plain tensor in params_dtype. Operations inside the function are not recorded for
     * gradients. Returns TE_OK or an error code. NULL => N(0, std^2).
     * TransformerEngine: init_method. */
    te_result (*init_method)(void *user, te_tensor *weight);
    void *user;   /* handed to init_method; borrowed for the module's lifetime */
} te_init;

/* Where parameters begin. */
typedef enum te_params_device {
    TE_PARAMS_DEFAULT = 0, /* on the context's device */
    TE_PARAMS_META = 1     /* without memory: a parameter has only a shape and a name until te_module_reset_parameters
                            * (device="meta") */
} te_params_device;

/* Splits a weight and its bias by rows into several parameters, each initialised on its own. The parameters lie in one
 * tensor, which the GEMM reads. Once te_module_add_parameter has replaced one of them, every forward copies all of them
 * into a new tensor for the GEMM. Refused with fuse_wgrad_accumulation, and for weights that are stored quantized. */
typedef struct te_parameters_split {
    const char *const *names; /* [count], read by the create function. A parameter is called NAME_weight or NAME_bias
                               * ("query" and "query_" both give query_weight) */
    const int64_t *sizes;     /* [count]: rows of each parameter, of all ranks together; NULL => equal sizes */
    int count;                /* 0 => one parameter, not split; at most 1040 */
} te_parameters_split;

/* Options of every module with weights that multiply. */
typedef struct te_gemm_options {
    bool no_bias;     /* no bias parameters */
    bool return_bias; /* the bias is not added, but returned as the output `bias` */
    te_init init;     /* how the weights are initialised; biases start at 0 */
    te_dtype params_dtype;        /* format of parameters: f32, f16 or bf16; 0 => bf16. TransformerEngine's default is
                                   * torch.get_default_dtype() */
    te_params_device device;      /* where parameters begin; 0 => on the context's device */
    const char *rng_tracker_name; /* the random state of the weights (te_rng_tracker_add); NULL => the context's */
    bool fuse_wgrad_accumulation; /* the GEMM of the weight gradient adds its result to te_tensor_main_grad(weight) */
    bool delay_wgrad_compute;     /* te_backward computes no weight gradients; te_backward_dw computes them later */
} te_gemm_options;

/* How ranks divide a GEMM. */
typedef enum te_parallel_mode {
    TE_PARALLEL_NONE = 0,   /* the GEMM is not divided */
    TE_PARALLEL_COLUMN = 1, /* each rank has some of the outputs */
    TE_PARALLEL_ROW = 2     /* each rank has some of the inputs, and the outputs are summed over the ranks */
} te_parallel_mode;
/* How the outputs of ranks are summed without sequence parallelism. Only the order of addition differs. */
typedef enum te_symmetric_ar {
    TE_SYMMETRIC_AR_NONE = 0,     /* te_all_reduce */
    TE_SYMMETRIC_AR_MULTIMEM = 1, /* multimem_all_reduce */
    TE_SYMMETRIC_AR_TWO_SHOT = 2, /* two_shot */
    TE_SYMMETRIC_AR_ONE_SHOT = 3  /* one_shot */
} te_symmetric_ar;
/* How ranks that share a sequence exchange keys and values. */
typedef enum te_cp_comm {
    TE_CP_P2P = 0,        /* keys and values go from rank to rank, in a ring */
    TE_CP_ALL_GATHER = 1, /* every rank gathers all keys and values at once */
    TE_CP_A2A = 2,        /* all-to-all: each rank keeps some heads, and receives the rest of the sequence for them */
    TE_CP_A2A_P2P = 3     /* all-to-all within cp_group, a ring over cp_p2p_group */
} te_cp_comm;
/* Options of every module whose work ranks can share.
 *
 * Tensor parallelism. Sizes in a desc are those of the whole module; each rank has a shard of the parameters. If all
 * ranks have the same seed, the shards of a weight together are the weight that a single rank would initialize. The
 * ranks exchange:
 *
 *     parallel_mode  sequence_parallel  forward                              backward
 *     column         off                nothing                              the input's gradient is all-reduced
 *     column         on                 the input is gathered                the input is gathered again, and its
 *                                                                            gradient is reduce-scattered
 *     row            off                the output is all-reduced            nothing
 *     row            on                 the output is reduce-scattered       the output's gradient is gathered
 *
 * Gathering and scattering go along the first dimension.
 * With one scale for each tensor, the ranks gather quantized data, and the amax is the maximum over all ranks. Delayed
 * scaling reduces the amax over amax_group, which must contain all ranks of tp_group. Without an amax_group it reduces
 * the amax over tp_group.
 * With one scale for each block, the ranks gather quantized data if each rank's rows and columns fill whole blocks
 * (128 x 128; MXFP8: 32, NVFP4: 16). Otherwise they gather unquantized data.
 * The bias of a row-parallel GEMM is added after the sum.
 * Overlap. The options ub_... run these exchanges on a second stream beside GEMMs, in te_graph captures too, if the
 * group is of processes; other groups exchange at the same points of the program, one after another. All ranks need
 * the same options. Of n ranks, a GEMM that ub_overlap_... splits is n GEMMs of one rank's rows each: a rank sends its
 * rows, or the results of theirs, to each other one by te_all_to_all, and adds up results in f32 in the order of the
 * ranks. So the traffic is that of the gather or reduce-scatter in the tensors' own format; ub_overlap_rs and
 * ub_overlap_rs_dgrad need memory for the results of all rows twice. On the CPU all numbers are those without the
 * options, bit for bit. On a GPU a GEMM of fewer rows may add up its k in another order; over more than two processes,
 * so may NCCL's reduce-scatter. Not split are GEMMs whose operand is gathered unquantized and quantized then (see
 * above), or has 128 x 128 blocks or swizzled scales, and the gather for return_layernorm_output_gathered. Except for
 * ub_bulk_wgrad the options need sequence_parallel, and have no effect without; nor have they in a GroupedLinear, which
 * exchanges nothing.
 * If te_tensor_sequence_parallel is true for a parameter, call te_all_reduce over tp_group for its gradient before the
 * optimizer's step.
 *
 * Context parallelism. n ranks share each sequence. A sequence has 2 n chunks of equal length: pad it to a multiple of
 * 2 n. Rank r has chunk r, and behind it chunk 2 n - 1 - r (te_get_batch_on_this_cp_rank).
 * Tensors of a call have this rank's rows. Exceptions: cu_seqlens and max_seqlen describe whole sequences, and the
 * columns of a bias are all keys in their order.
 * Call te_all_reduce over the n ranks for the gradients of parameters, softmax_offset included. max_logit is the
 * maximum over all ranks.
 * With TE_CP_A2A_P2P, n is size(cp_group) * size(cp_p2p_group), and r is size(cp_group) * (rank in cp_p2p_group) +
 * (rank in cp_group).
 *
 *     kind              exchanges                                         also supports
 *     TE_CP_P2P         keys and values, in a ring; memory grows with     TE_ATTN_BIAS_POST_SCALE, not with TE_THD
 *                       this rank's tokens alone
 *     TE_CP_ALL_GATHER  keys and values, all at once                      windows (*)
 *     TE_CP_A2A         q, k, v and o: each rank computes some of the     windows, softmax types other than vanilla
 *                       heads, for all tokens. n must divide the number
 *                       of heads and of GQA groups
 *     TE_CP_A2A_P2P     as TE_CP_A2A within cp_group, and as TE_CP_P2P
 *                       over cp_p2p_group
 *
 * (*) There must be as many keys as queries. The mask must not be TE_MASK_PADDING.
 *
 * The masks are TE_MASK_NONE and TE_MASK_CAUSAL. With TE_THD they are TE_MASK_PADDING and TE_MASK_PADDING_CAUSAL.
 * Causal masks need as many keys as queries. All kinds support return_max_logit and dropout. Ranks that are seeded
 * alike drop different elements. Other masks and biases, caches and score_mod give TE_ERR_UNSUPPORTED. Partial outputs
 * are merged in f32. A ring exchanges gradients of keys and values in f32, the other kinds in the tensors' format. Over
 * NCCL, the ring's exchanges run on a second stream beside the products, in te_graph captures too.
 * With fp8_dpa and fp8_mha of a per-tensor recipe, q, k, v and the gradient of o are exchanged as FP8 codes, which have
 * one scale on all n ranks: their amaxes are reduced over these ranks, whatever amax_group and no_reduce_amax say. With
 * current scaling o and the gradients of q, k and v are rounded by each rank's own scales. MXFP8 exchanges decoded
 * numbers, and needs multiples of 128 tokens on each rank. A custom recipe gives TE_ERR_UNSUPPORTED. */
typedef struct te_parallel_options {
    te_group *tp_group;              /* the ranks that share each layer (borrowed for the module's lifetime). NULL =>
                                      * none, or set later by te_set_tensor_parallel_group */
    int tp_size;                     /* the size of the group that te_set_tensor_parallel_group will set; 0 => 1 */
    te_parallel_mode parallel_mode;  /* how the GEMM of a Linear, GroupedLinear or LayerNormLinear is divided. A
                                      * LayerNormLinear allows only TE_PARALLEL_COLUMN */
    bool set_parallel_mode;          /* in a LayerNormMLP, MultiheadAttention or TransformerLayer: fc1 and qkv are
                                      * divided by column, fc2 and proj by row; false => no GEMM is divided */
    bool sequence_parallel;          /* ranks share the first dimension of activations before GEMMs divided by column
                                      * and behind GEMMs divided by row (te_tensor_sequence_parallel) */
    te_symmetric_ar symmetric_ar_type; /* TransformerEngine's choice of the all-reduce after a GEMM that is divided by
                                        * row. te.h ignores it, and always runs te_all_reduce */
    bool ub_overlap_ag;              /* the gather before a GEMM comes in pieces, beside the product of pieces that have
                                      * come (see above); false => the whole, before the product. TransformerEngine's
                                      * TransformerLayer: true */
    bool ub_overlap_rs;              /* the reduce-scatter of the output goes in pieces, beside the product of other
                                      * pieces; false => the whole, behind the product. TransformerEngine's
                                      * TransformerLayer: true */
    bool ub_overlap_rs_dgrad;        /* the same of the input's gradient; ub_bulk_wgrad then has nothing to do */
    bool ub_bulk_dgrad;              /* the input is gathered again beside the GEMM of the input's gradient; false =>
                                      * behind it. TransformerEngine's TransformerLayer: true */
    bool ub_bulk_wgrad;              /* the input's gradient is summed over the ranks beside the GEMM of the weight's
                                      * gradient; false => before it. TransformerEngine's TransformerLayer: true */
    te_group *cp_group;              /* for attention, the ranks that share each sequence (borrowed for the module's
                                      * lifetime). NULL => none, or set later by te_set_context_parallel_group */
    te_group *cp_p2p_group;          /* with TE_CP_A2A_P2P, the ranks of the ring: those with the same rank number in
                                      * their cp_group (borrowed for the module's lifetime) */
    te_cp_comm cp_comm_type;         /* how the ranks of cp_group exchange keys and values; 0 => TE_CP_P2P */
} te_parallel_options;

/* Where keys and values come from. */
typedef enum te_attn_type {
    TE_ATTENTION_SELF = 0, /* from the queries' input */
    TE_ATTENTION_CROSS = 1 /* from encoder_output */
} te_attn_type;
/* A norm over each head of queries and keys. */
typedef enum te_qk_norm {
    TE_QK_NORM_NONE = 0,     /* none */
    TE_QK_NORM_L2 = 1,       /* x / sqrt(sum(x^2) + eps) */
    TE_QK_NORM_RMSNORM = 2,  /* RMSNorm, with a weight that heads share */
    TE_QK_NORM_LAYERNORM = 3 /* LayerNorm, with a weight and a bias that heads share */
} te_qk_norm;

/* Options of every module with attention. */
typedef struct te_attn_options {
    int num_attention_heads;    /* query heads */
    int num_gqa_groups;         /* number of heads of keys and values, a divisor of num_attention_heads; 0 =>
                                 * num_attention_heads */
    int64_t kv_channels;        /* size of a head; 0 => hidden_size / num_attention_heads */
    float attention_dropout;    /* probability of dropout; 0 => none. TransformerEngine's default is 0.1 in
                                 * TransformerLayer and MultiheadAttention */
    const char *rng_tracker_name; /* the random state of the dropout (te_rng_tracker_add); NULL =>
                                   * gemm.rng_tracker_name, or the context's */
    te_qkv_format qkv_format;   /* 0 => sbhd; TransformerEngine's TransformerLayer calls it attn_input_format */
    te_attn_mask attn_mask_type; /* 0 => causal; TransformerEngine's TransformerLayer calls it self_attn_mask_type */
    te_window window;           /* TransformerEngine: window_size. With a causal mask `right` counts as 0. With other
                                 * masks there is no window if (left, right) is (-1, -1) or (-1, 0) */
    te_switch bottom_right_diagonal; /* the diagonal of the window and of ALiBi ends in the bottom right corner of the
                                      * scores; 0 => on (te_attn_rule) */
    float softmax_scale;        /* factor of the scores; 0 => 1 / sqrt(kv_channels) */
    te_softmax_type softmax_type; /* 0 => vanilla */
    bool return_max_logit;      /* the largest score of each head is the output `max_logit`, f32 [H], without a
                                 * gradient */
    te_attn_type attention_type; /* self or cross attention, in a MultiheadAttention. Self attention uses cu_seqlens_q
                                  * if cu_seqlens_kv is not given */
    bool no_qkv_weight_interleaved; /* the weight has all rows of Q, then of K, then of V, as by default in
                                     * TransformerEngine. false => the weight has for each GQA group in turn the rows of
                                     * its query heads, then of its k, then of its v */
    bool no_fuse_qkv_params;    /* query_weight, key_weight and value_weight are separate parameters, not interleaved;
                                 * false => one weight. TransformerEngine's default is separate parameters
                                 * (fuse_qkv_params=False) */
    te_qk_norm qk_norm_type;    /* the kind of the modules q_norm and k_norm; 0 => no such modules */
    float qk_norm_eps;          /* 0 => 1e-6 */
    bool qk_norm_before_rope;   /* the norms run before the rotation; false => after it */
    bool checkpoint_core_attention; /* the core (Q K^T, softmax, product with V) runs again in the backward pass
                                     * (te_module_set_checkpoint) */
} te_attn_options;

typedef struct te_inference_params te_inference_params; /* the keys and values of earlier calls (KV cache):
                                                         * api/inference.h */

/* Options of one forward call, for every module with attention. Zero means "not given". Tensors are borrowed for the
 * call.
 *
 * With a padding mask, the lengths of sequences come from cu_seqlens_q and cu_seqlens_kv. If these are NULL, they come
 * from attention_mask and attention_mask_q, whose padding must lie behind the tokens of each sequence. With
 * other masks cu_seqlens are refused, and only TE_MASK_ARBITRARY reads attention_mask, as in TransformerEngine. Self
 * attention in a TransformerLayer uses cu_seqlens_q for its keys too. */
typedef struct te_attn_call {
    te_attn_mask attn_mask_type;     /* 0 => the module's own */
    te_window window;                /* window.on false => the module's own */
    te_switch bottom_right_diagonal; /* 0 => the module's own */
    te_tensor *attention_mask;       /* u8, 1 => masked. With a padding mask, [b, 1, 1, s]: the padding of the keys, and
                                      * of the queries if attention_mask_q is NULL. With TE_MASK_ARBITRARY, it
                                      * broadcasts to [b, H, s_q, s_kv] */
    te_tensor *attention_mask_q;     /* u8 [b, 1, 1, s_q]: the padding of the queries; cross attention needs both
                                      * masks */
    te_tensor *cu_seqlens_q, *cu_seqlens_kv;               /* i32 [b + 1], where each sequence starts */
    te_tensor *cu_seqlens_q_padded, *cu_seqlens_kv_padded; /* i32 [b + 1], with TE_THD: where each sequence starts in
                                                            * memory, if sequences have padding */
    int64_t max_seqlen_q, max_seqlen_kv; /* with TE_THD, an upper bound for the length of a sequence; tokens beyond it
                                          * are cut off. 0 => the number of all tokens (TransformerEngine: the longest
                                          * length, rounded up to a multiple of 64) */
    te_switch pad_between_seqs;      /* cu_seqlens_q_padded and cu_seqlens_kv_padded are read; 0 => on if they are
                                      * given */
    te_attn_bias core_attention_bias_type; /* 0 => none */
    te_tensor *core_attention_bias;  /* [b or 1, H or 1, s_q or 1, s_kv], where H counts this rank's heads;
                                      * differentiable */
    te_tensor *alibi_slopes;         /* f32 [H] or [b, H], where H counts this rank's heads; NULL => powers of 2^(-8 /
                                      * H) */
    bool checkpoint_core_attention;  /* the core of this call runs again in the backward pass */
    te_inference_params *inference_params; /* the cache of keys and values (borrowed), for self attention between
                                            * te_no_grad_begin and te_no_grad_end. The cache gives the lengths. Causal
                                            * masks become padding_causal_bottom_right */
    te_tensor *k_factors, *v_factors; /* key and value are e4m3 codes of a cache, and these the factors of their rows
                                       * (te_attn_rule); NULL => key and value are numbers. Calls with inference_params
                                       * get those of the cache */
    const te_score_mod *score_mod;   /* the program's own formula for scores and masks; NULL => none. Its source texts
                                      * must live until the backward pass, if the call runs again there */
    /* Packed inputs of DotProductAttention. qkv_layer [.., 3, H, d] replaces input, key and value. With G < H groups it
     * is [.., H + 2 G, d]. kv_layer [.., 2, G, d] replaces key and value. Packed tensors are copied if the call has a
     * cache or runs in FP8, or if several ranks share the sequence. */
    te_tensor *qkv_layer, *kv_layer;
    int qkv_interleave_dim;          /* index, from the end, of the dimension that separates q, k and v. -3: the shapes
                                      * above. -2: qkv_layer is [.., H, 3, d], or [.., G, H / G + 2, d] if G < H.
                                      * kv_layer is [.., G, 2, d]. 0 => -3 */
} te_attn_call;

/* Options of a decoder's cross attention in one forward call, where they differ from those of its self attention. */
typedef struct te_cross_attention_call {
    te_tensor *enc_dec_attn_mask;            /* like te_attn_call.attention_mask: the padding of the encoder's output,
                                              * or the mask of TE_MASK_ARBITRARY */
    te_tensor *enc_dec_attn_mask_q;          /* like te_attn_call.attention_mask_q: the padding of the decoder's tokens
                                              * (the first of TransformerEngine's pair enc_dec_attn_mask) */
    te_attn_mask enc_dec_attn_mask_type;     /* 0 => the module's own */
    te_window enc_dec_window;                /* enc_dec_window.on false => the module's own */
    te_switch enc_dec_bottom_right_diagonal; /* 0 => the module's own */
} te_cross_attention_call;
