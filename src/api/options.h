/* api/options.h: groups of options that several modules have. A desc embeds them, and a module hands them to its
 * children whole. Names are TransformerEngine's; zero is the default.
 *
 * These options of TransformerEngine have no field:
 *   get_rng_state_tracker    a context has its random states itself (te_rng_tracker_add); rng_tracker_name names one
 *   ub_overlap_*, ub_bulk_*, ub_name  userbuffers need memory that GPUs of several processes share: products and
 *                                     collectives follow each other on the stream
 *   cp_stream                a context has one stream for what it computes, and adds its own
 *   cp_global_ranks          te_send and te_recv take ranks of the group
 *   layer_number             te_module_path names a module; te.h does not scale by the number
 *                            (NVTE_APPLY_QK_LAYER_SCALING)
 *   seq_length, micro_batch_size  warm TorchScript up; te_warmup takes a shape
 *   qkv_format of InferenceParams and of a forward call  each module has one
 *   custom_cache_manager     attention of the program's own (te_module_set_forward) keeps keys and values as it likes
 *   fast_zero_fill, num_splits    choices of speed with the same results, which the kernels make themselves
 *   kv_channels as a pair    DotProductAttention takes the size of a head of values from `value`
 *   hidden_size as a tuple   te_tensor_view joins the sizes
 *   attention_softmax_in_fp32, apply_query_key_layer_scaling, skip_weight_param_allocation, and forward's weight and
 *                            bias: gone from TransformerEngine */

/* The first values of weights. Biases begin at 0, norms at the identity. */
typedef struct te_init {
    float std;    /* of N(0, std^2); 0 => 0.023 */
    bool no_init; /* leave uninitialised (a checkpoint will be loaded) */
    /* The user's own values: fills the plain `weight` [out, in], in the format of params_dtype, and returns TE_OK or an
     * error's code. Nothing is recorded inside.
     * TransformerEngine: init_method. NULL => N(0, std^2). */
    te_result (*init_method)(void *user, te_tensor *weight);
    void *user;   /* handed to it; borrowed for the module's lifetime */
} te_init;

/* Where parameters begin. */
typedef enum te_params_device {
    TE_PARAMS_DEFAULT = 0, /* on the context's device */
    TE_PARAMS_META = 1     /* nowhere: shapes and names alone, until te_module_reset_parameters (device="meta") */
} te_params_device;

/* A weight, and its bias, as several parameters, each with first values of its own. They lie row after row in one
 * tensor, which the product reads; another tensor may be put in the place of one (te_module_add_parameter): then every
 * call copies them together. Not with fuse_wgrad_accumulation, nor stored quantized. */
typedef struct te_parameters_split {
    const char *const *names; /* [count], read by the create function: the parameters are NAME_weight and NAME_bias
                               * ("query" and "query_" give query_weight) */
    const int64_t *sizes;     /* [count] rows of each, of all ranks; NULL => equal ones */
    int count;                /* 0 => one parameter; at most 1040 */
} te_parameters_split;

/* Of every module with weights that multiply. */
typedef struct te_gemm_options {
    bool no_bias;     /* no bias parameters */
    bool return_bias; /* the bias is not added: it is the output `bias`, for a caller who fuses the addition */
    te_init init;     /* of the weights; biases start at 0 */
    te_dtype params_dtype;        /* of parameters: f32, f16 or bf16; 0 => bf16 */
    te_params_device device;      /* of parameters; 0 => the context's */
    const char *rng_tracker_name; /* the random state that weights begin from (te_rng_tracker_add); NULL => the
                                   * context's */
    bool fuse_wgrad_accumulation; /* weight gradients are added into te_tensor_main_grad(weight) by the product that
                                   * makes them */
    bool delay_wgrad_compute;     /* te_backward leaves weight gradients to te_backward_dw */
} te_gemm_options;

/* How a product is divided among ranks. */
typedef enum te_parallel_mode {
    TE_PARALLEL_NONE = 0,   /* it is not divided */
    TE_PARALLEL_COLUMN = 1, /* each rank has some of the outputs */
    TE_PARALLEL_ROW = 2     /* each rank has some of the inputs, and the outputs are added up */
} te_parallel_mode;
/* How outputs are added up without sequence parallelism. The sums are the same up to their order. */
typedef enum te_symmetric_ar {
    TE_SYMMETRIC_AR_NONE = 0,     /* te_all_reduce */
    TE_SYMMETRIC_AR_MULTIMEM = 1, /* multimem_all_reduce */
    TE_SYMMETRIC_AR_TWO_SHOT = 2, /* two_shot */
    TE_SYMMETRIC_AR_ONE_SHOT = 3  /* one_shot */
} te_symmetric_ar;
/* How ranks that share a sequence exchange keys and values. */
typedef enum te_cp_comm {
    TE_CP_P2P = 0,        /* from rank to rank, in a ring */
    TE_CP_ALL_GATHER = 1, /* all of them at once */
    TE_CP_A2A = 2,        /* heads for pieces of the sequence */
    TE_CP_A2A_P2P = 3     /* heads within cp_group, a ring over cp_p2p_group */
} te_cp_comm;
/* Of every module whose work ranks can share.
 *
 * Sizes in a desc are those of the whole; each rank's parameters are its shard. First values are the slices of what one
 * rank alone would draw from the same random state: seed all ranks alike. The exchanges between ranks:
 *
 *     parallel_mode  sequence_parallel  forward                              backward
 *     column         off                nothing                              the input's gradient is added up
 *     column         on                 the input is gathered                it is gathered again, and the input's
 *                    gradient added up and scattered
 *     row            off                the output is added up               nothing
 *     row            on                 it is added up and scattered         the output's gradient is gathered
 *
 * Gathering and scattering go along the first dimension. Under a recipe codes are gathered, of one scale a tensor (the
 * amax is the group's; delayed scaling reduces it over amax_group, which must hold all these ranks, or over tp_group
 * without one) or of blocks where the rows and columns of each rank fill them (128 x 128; MXFP8 32, NVFP4 16); else
 * plain numbers are, and quantized where they arrive. A bias by row is added after the sum. Gradients of parameters
 * that say te_tensor_sequence_parallel are this rank's part: te_all_reduce them before the optimizer.
 *
 * Context parallelism: n ranks share each sequence, which is 2 n chunks of one length; rank r has numbers r and 2 n - 1
 * - r, one behind the other, so that all have as much work under a causal mask (te_get_batch_on_this_cp_rank brings a
 * batch into this layout). So each sequence is padded to a multiple of 2 n. Every tensor of a call is this rank's, but
 * cu_seqlens and max_seqlen, which are those of whole sequences, and the columns of a bias, which are all keys in their
 * order. Gradients of parameters, softmax_offset's too, are this rank's part: te_all_reduce them over all these ranks.
 * max_logit is that of all. With TE_CP_A2A_P2P there are size(cp_group) * size(cp_p2p_group) ranks, and the rank is
 * size(cp_group) * rank in cp_p2p_group + rank in cp_group.
 *
 *     kind              exchanges                                         takes also
 *     TE_CP_P2P         keys and values in a ring; memory stays that of   TE_ATTN_BIAS_POST_SCALE, not with TE_THD
 *                       this rank's tokens
 *     TE_CP_ALL_GATHER  keys and values at once                           windows, with as many keys as queries; with
 *                                                                         TE_THD under the causal mask alone
 *     TE_CP_A2A         heads for tokens; the ranks divide heads, groups  windows, softmax types beside vanilla
 *     TE_CP_A2A_P2P     heads in cp_group, a ring over cp_p2p_group
 *
 * All take TE_MASK_NONE and TE_MASK_CAUSAL (as many keys as queries), with TE_THD TE_MASK_PADDING and
 * TE_MASK_PADDING_CAUSAL, dropout (ranks that are seeded alike drop different elements), and return_max_logit. Other
 * masks and biases, fp8_dpa and fp8_mha, caches and score_mod give TE_ERR_UNSUPPORTED. Outputs of parts are merged in
 * f32; f32 gradients of keys and values travel in the ring. */
typedef struct te_parallel_options {
    te_group *tp_group;              /* the ranks that share each layer (borrowed for the module's lifetime); NULL =>
                                      * none, or te_set_tensor_parallel_group */
    int tp_size;                     /* how many they are, where the group comes later; 0 => 1 */
    te_parallel_mode parallel_mode;  /* Linear, GroupedLinear, LayerNormLinear (column alone): how the product is
                                      * divided */
    bool set_parallel_mode;          /* LayerNormMLP, MultiheadAttention, TransformerLayer: first products by column,
                                      * second ones by row; off: no work is shared */
    bool sequence_parallel;          /* between these the ranks share the first dimension; norms: a mark on their
                                      * parameters */
    te_symmetric_ar symmetric_ar_type; /* the all-reduce behind a product divided by row; te_all_reduce makes each */
    te_group *cp_group;              /* attention: the ranks that share each sequence (borrowed for the module's
                                      * lifetime); NULL => none, or te_set_context_parallel_group */
    te_group *cp_p2p_group;          /* with TE_CP_A2A_P2P: the ranks of the ring, which have the same number in their
                                      * cp_group; likewise */
    te_cp_comm cp_comm_type;         /* how these exchange keys and values; 0 => TE_CP_P2P */
} te_parallel_options;

/* Where keys and values come from. */
typedef enum te_attention_type {
    TE_ATTENTION_SELF = 0, /* from the queries' input */
    TE_ATTENTION_CROSS = 1 /* from encoder_output */
} te_attention_type;
/* A norm of each head of queries and keys. */
typedef enum te_qk_norm {
    TE_QK_NORM_NONE = 0,     /* none */
    TE_QK_NORM_L2 = 1,       /* x / sqrt(sum(x^2) + eps) */
    TE_QK_NORM_RMSNORM = 2,  /* with a weight that heads share */
    TE_QK_NORM_LAYERNORM = 3 /* with a weight and a bias that heads share */
} te_qk_norm;

/* Of every module with attention. */
typedef struct te_attention_options {
    int num_attention_heads;    /* query heads */
    int num_gqa_groups;         /* heads of keys and values, which divide those; 0 => num_attention_heads */
    int64_t kv_channels;        /* size of a head; 0 => hidden_size / num_attention_heads */
    float attention_dropout;    /* probability; 0 => none (TransformerEngine's TransformerLayer has 0.1) */
    const char *rng_tracker_name; /* the random state that it draws from (te_rng_tracker_add); NULL =>
                                   * gemm.rng_tracker_name, or the context's */
    te_qkv_format qkv_format;   /* 0 => sbhd; attn_input_format of a TransformerLayer */
    te_attn_mask attn_mask_type; /* 0 => causal; self_attn_mask_type of a TransformerLayer */
    te_window window;           /* window_size: (left, 0) under causal masks, both bounds or none under others; (left,
                                 * right) is (left, 0) for the first, (-1, 0) none for the others */
    te_switch bottom_right_diagonal; /* the window, and ALiBi's distance, count from the bottom right corner; 0 => on.
                                      * It has no effect with TE_MASK_CAUSAL and PADDING_CAUSAL, which count from the
                                      * top left, nor with masks named bottom_right */
    float softmax_scale;        /* 0 => 1 / sqrt(kv_channels) */
    te_softmax_type softmax_type; /* 0 => vanilla */
    bool return_max_logit;      /* the largest score of each head is the output `max_logit`, f32 [H], without a
                                 * gradient */
    te_attention_type attention_type; /* MultiheadAttention: cross attention; of self attention cu_seqlens_q are the
                                       * keys' lengths too, where those are not given */
    bool no_qkv_weight_interleaved; /* rows of the weight are [Q | K | V] in place of [groups, (q.., k, v)] */
    bool no_fuse_qkv_params;    /* query_weight, key_weight and value_weight are parameters of their own
                                 * (TransformerEngine's default): then not interleaved */
    te_qk_norm qk_norm_type;    /* modules q_norm and k_norm; 0 => none */
    float qk_norm_eps;          /* 0 => 1e-6 */
    bool qk_norm_before_rope;   /* the norms stand before the rotation */
    bool checkpoint_core_attention; /* softmax and its products run again in the backward pass:
                                     * te_module_set_checkpoint(core_attention) */
} te_attention_options;

typedef struct te_inference_params te_inference_params; /* the keys and values of earlier calls (KV cache):
                                                         * api/inference.h */

/* Options of one forward call, for every module with attention. Zero means "not given". Tensors are borrowed for the
 * call.
 *
 * Lengths of sequences, for the padding masks, come from cu_seqlens_q and cu_seqlens_kv, or else from masks of the
 * padding behind the tokens of each sequence, without a wait for the device. With other masks cu_seqlens are refused,
 * and attention_mask is read with TE_MASK_ARBITRARY alone, as in TransformerEngine. A TransformerLayer's self attention
 * takes cu_seqlens_q for its keys too; its cross attention takes both. */
typedef struct te_attention_call {
    te_attn_mask attn_mask_type;     /* 0 => the module's own */
    te_window window;                /* not on => the module's own */
    te_switch bottom_right_diagonal; /* 0 => the module's own */
    te_tensor *attention_mask;       /* u8, 1 => masked: padding [b, 1, 1, s], of queries too unless attention_mask_q is
                                      * given; TE_MASK_ARBITRARY: all that broadcasts to [b, H, s_q, s_kv] */
    te_tensor *attention_mask_q;     /* padding of the queries, [b, 1, 1, s_q]; cross attention needs it beside
                                      * attention_mask */
    te_tensor *cu_seqlens_q, *cu_seqlens_kv;               /* i32 [b + 1], where each sequence starts */
    te_tensor *cu_seqlens_q_padded, *cu_seqlens_kv_padded; /* with TE_THD: the same in memory, where sequences have
                                                            * padding between them */
    int64_t max_seqlen_q, max_seqlen_kv; /* with TE_THD: the longest sequence; 0 => as long as all tokens. The smaller,
                                          * the less work; longer ones are cut */
    te_switch pad_between_seqs;      /* 0 => on if the padded starts are given; off: these are not read */
    te_attn_bias core_attention_bias_type; /* 0 => none */
    te_tensor *core_attention_bias;  /* B [b or 1, H or 1, s_q or 1, s_kv], of this rank's heads; differentiable */
    te_tensor *alibi_slopes;         /* f32 [H] or [b, H], of this rank's heads; NULL => powers of 2^(-8 / H) */
    bool checkpoint_core_attention;  /* softmax and its products of this call run again in the backward pass */
    te_inference_params *inference_params; /* the cache (borrowed): self attention alone, inside te_no_grad_begin; the
                                            * lengths are its own, and causal masks padding_causal_bottom_right */
    const te_score_mod *score_mod;   /* the user's rule for scores and masks; NULL => none. Where the call runs again in
                                      * the backward pass, its texts live until then */
    te_tensor *qkv_layer, *kv_layer; /* DotProductAttention: packed [.., 3, H, d] in place of input, key and value, and
                                      * [.., 2, G, d] in place of key and value. In fewer groups than heads [.., H + 2
                                      * G, d]. They are read where they lie, and their gradients written as one; under a
                                      * cache, in FP8 and over ranks they are copied apart first */
    int qkv_interleave_dim;          /* where the 3 or 2 stands: -3, or -2 for [.., H, 3, d], and in fewer groups than
                                      * heads for [.., G, H / G + 2, d]; 0 => -3 */
} te_attention_call;

/* The same of a decoder's cross attention, where it differs. */
typedef struct te_cross_attention_call {
    te_tensor *enc_dec_attn_mask;            /* as attention_mask: padding of the encoder's output, or
                                              * TE_MASK_ARBITRARY's */
    te_tensor *enc_dec_attn_mask_q;          /* as attention_mask_q: padding of the decoder's tokens (the first of
                                              * TransformerEngine's pair) */
    te_attn_mask enc_dec_attn_mask_type;     /* 0 => the module's own */
    te_window enc_dec_window;                /* not on => the module's own */
    te_switch enc_dec_bottom_right_diagonal; /* 0 => the module's own */
} te_cross_attention_call;
