/* api/options.h: groups of options that several modules have. A desc embeds these groups, and a module hands them to
 * its children unchanged. Names are TransformerEngine's, and zero is the default. Where zero means something else than
 * TransformerEngine's default, the field's comment says so.
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
    float std;    /* standard deviation of N(0, std^2); 0 => 0.023 */
    bool no_init; /* leave the weights uninitialised (a checkpoint will be loaded) */
    /* Fills the plain `weight` [out, in], in the format of params_dtype, with values of the user's, and returns TE_OK
     * or an error's code. Nothing is recorded inside. NULL => N(0, std^2).
     * TransformerEngine: init_method. */
    te_result (*init_method)(void *user, te_tensor *weight);
    void *user;   /* handed to init_method; borrowed for the module's lifetime */
} te_init;

/* Where parameters begin. */
typedef enum te_params_device {
    TE_PARAMS_DEFAULT = 0, /* on the context's device */
    TE_PARAMS_META = 1     /* nowhere: shapes and names alone, until te_module_reset_parameters (device="meta") */
} te_params_device;

/* Splits a weight and its bias by rows into several parameters, each with first values of its own. The parameters lie
 * row after row in one tensor, which the product reads. The program may put another tensor in the place of one
 * (te_module_add_parameter): then every call copies all of them together. Refused with fuse_wgrad_accumulation, and for
 * weights that are stored quantized. */
typedef struct te_parameters_split {
    const char *const *names; /* [count], read by the create function: the parameters are NAME_weight and NAME_bias
                               * ("query" and "query_" give query_weight) */
    const int64_t *sizes;     /* [count] rows of each parameter, summed over all ranks; NULL => equal sizes */
    int count;                /* 0 => one parameter, not split; at most 1040 */
} te_parameters_split;

/* Options of every module with weights that multiply. */
typedef struct te_gemm_options {
    bool no_bias;     /* no bias parameters */
    bool return_bias; /* the bias is not added: it is the output `bias`, for a caller who fuses the addition */
    te_init init;     /* of the weights; biases start at 0 */
    te_dtype params_dtype;        /* format of parameters: f32, f16 or bf16; 0 => bf16. TransformerEngine's default is
                                   * torch.get_default_dtype(), f32 unless the program sets another */
    te_params_device device;      /* where parameters begin; 0 => on the context's device */
    const char *rng_tracker_name; /* the random state that the weights are drawn from (te_rng_tracker_add); NULL => the
                                   * context's */
    bool fuse_wgrad_accumulation; /* the product that makes a weight gradient adds it into
                                   * te_tensor_main_grad(weight) */
    bool delay_wgrad_compute;     /* te_backward leaves weight gradients to te_backward_dw */
} te_gemm_options;

/* How ranks divide a product. */
typedef enum te_parallel_mode {
    TE_PARALLEL_NONE = 0,   /* the product is not divided */
    TE_PARALLEL_COLUMN = 1, /* each rank has some of the outputs */
    TE_PARALLEL_ROW = 2     /* each rank has some of the inputs, and the outputs are summed over the ranks */
} te_parallel_mode;
/* How outputs are summed over ranks without sequence parallelism. All values give the same sums, up to the order of
 * addition. */
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
    TE_CP_A2A = 2,        /* all-to-all: each rank gives heads away and gets more of the sequence for its own heads */
    TE_CP_A2A_P2P = 3     /* all-to-all within cp_group, a ring over cp_p2p_group */
} te_cp_comm;
/* Options of every module whose work ranks can share.
 *
 * Tensor parallelism. Sizes in a desc are those of the whole; each rank's parameters are its shard. First values are
 * slices of what one rank alone would draw from the same random state: seed all ranks alike. The exchanges between
 * ranks:
 *
 *     parallel_mode  sequence_parallel  forward                              backward
 *     column         off                nothing                              the input's gradient is all-reduced
 *     column         on                 the input is gathered                the input is gathered again, and its
 *                                                                            gradient is reduce-scattered
 *     row            off                the output is all-reduced            nothing
 *     row            on                 the output is reduce-scattered       the output's gradient is gathered
 *
 * Gathering and scattering go along the first dimension. Under a recipe the ranks gather codes where all ranks' codes
 * fit together: codes with one scale a tensor (its amax is the group's: delayed scaling reduces it over amax_group,
 * which must hold all these ranks, or over tp_group without an amax_group), and codes of blocks where each rank's rows
 * and columns fill whole blocks (128 x 128; MXFP8 32, NVFP4 16). Otherwise the ranks gather plain numbers and quantize
 * them afterwards. The bias of a row-parallel product is added after the sum. Gradients of parameters for which
 * te_tensor_sequence_parallel is true are this rank's part: te_all_reduce them before the optimizer's step.
 *
 * Context parallelism. n ranks share each sequence. A sequence is 2 n chunks of one length; rank r has chunks r and 2
 * n - 1 - r, one behind the other, so that all ranks have as much work under a causal mask
 * (te_get_batch_on_this_cp_rank brings a batch into this layout). So each sequence is padded to a multiple of 2 n.
 * Every tensor of a call is this rank's part, except cu_seqlens and max_seqlen, which describe whole sequences, and the
 * columns of a bias, which are all keys in their order. Gradients of parameters, softmax_offset included, are this
 * rank's part: te_all_reduce them over all these ranks. max_logit is the maximum over all ranks. With TE_CP_A2A_P2P
 * there are size(cp_group) * size(cp_p2p_group) ranks, and r is size(cp_group) * (rank in cp_p2p_group) + (rank in
 * cp_group).
 *
 *     kind              exchanges                                         takes also
 *     TE_CP_P2P         keys and values in a ring; memory stays that of   TE_ATTN_BIAS_POST_SCALE, not with TE_THD
 *                       this rank's tokens
 *     TE_CP_ALL_GATHER  keys and values at once                           windows, with as many keys as queries; with
 *                                                                         TE_THD under the causal mask alone
 *     TE_CP_A2A         heads for tokens; the ranks divide heads, groups  windows, softmax types beside vanilla
 *     TE_CP_A2A_P2P     heads in cp_group, a ring over cp_p2p_group
 *
 * All kinds take TE_MASK_NONE and TE_MASK_CAUSAL, or with TE_THD TE_MASK_PADDING and TE_MASK_PADDING_CAUSAL (causal
 * masks with as many keys as queries); dropout (ranks that are seeded alike drop different elements); and
 * return_max_logit. Other masks and biases, fp8_dpa and fp8_mha, caches and score_mod give TE_ERR_UNSUPPORTED. Outputs
 * of parts are merged in f32; gradients of keys and values travel around the ring in f32. */
typedef struct te_parallel_options {
    te_group *tp_group;              /* the ranks that share each layer (borrowed for the module's lifetime); NULL =>
                                      * none, or set later by te_set_tensor_parallel_group */
    int tp_size;                     /* number of ranks in the group that te_set_tensor_parallel_group will set; 0 =>
                                      * 1 */
    te_parallel_mode parallel_mode;  /* Linear, GroupedLinear, LayerNormLinear (column alone): how the product is
                                      * divided */
    bool set_parallel_mode;          /* LayerNormMLP, MultiheadAttention, TransformerLayer: first products are divided
                                      * by column, second products by row; false => no work is shared */
    bool sequence_parallel;          /* between the divided products the ranks share the first dimension; norms: their
                                      * parameters are marked (te_tensor_sequence_parallel) */
    te_symmetric_ar symmetric_ar_type; /* the all-reduce behind a product divided by row; te.h runs te_all_reduce for
                                        * every value */
    te_group *cp_group;              /* attention: the ranks that share each sequence (borrowed for the module's
                                      * lifetime); NULL => none, or set later by te_set_context_parallel_group */
    te_group *cp_p2p_group;          /* with TE_CP_A2A_P2P: the ranks of the ring, which have the same rank number in
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
    int num_gqa_groups;         /* heads of keys and values; divides num_attention_heads; 0 => num_attention_heads */
    int64_t kv_channels;        /* size of a head; 0 => hidden_size / num_attention_heads */
    float attention_dropout;    /* probability; 0 => none. TransformerEngine's default is 0.1 in TransformerLayer and
                                 * MultiheadAttention, 0 in DotProductAttention */
    const char *rng_tracker_name; /* the random state that the dropout draws from (te_rng_tracker_add); NULL =>
                                   * gemm.rng_tracker_name, or the context's */
    te_qkv_format qkv_format;   /* 0 => sbhd; attn_input_format of a TransformerLayer */
    te_attn_mask attn_mask_type; /* 0 => causal; self_attn_mask_type of a TransformerLayer */
    te_window window;           /* TransformerEngine: window_size. Causal masks: (left, 0); a right bound counts as 0.
                                 * Other masks: two numbers of keys, or -1 twice for no window; (-1, 0) counts as no
                                 * window */
    te_switch bottom_right_diagonal; /* the window, and ALiBi's distance, count from the bottom right corner; 0 => on.
                                      * No effect with TE_MASK_CAUSAL and TE_MASK_PADDING_CAUSAL, which count from the
                                      * top left, and with masks named bottom_right */
    float softmax_scale;        /* factor of the scores; 0 => 1 / sqrt(kv_channels) */
    te_softmax_type softmax_type; /* 0 => vanilla */
    bool return_max_logit;      /* the largest score of each head is the output `max_logit`, f32 [H], without a
                                 * gradient */
    te_attn_type attention_type; /* MultiheadAttention: self or cross attention. Under self attention cu_seqlens_q
                                       * are the keys' lengths too where cu_seqlens_kv is not given */
    bool no_qkv_weight_interleaved; /* rows of the weight are [Q | K | V]; false => [groups, (q.., k, v)], except with
                                     * no_fuse_qkv_params. TransformerEngine's default layout is [Q | K | V], because
                                     * its fuse_qkv_params is off */
    bool no_fuse_qkv_params;    /* query_weight, key_weight and value_weight are parameters of their own, and not
                                 * interleaved; false => one weight. TransformerEngine's default is separate parameters
                                 * (fuse_qkv_params=False) */
    te_qk_norm qk_norm_type;    /* modules q_norm and k_norm; 0 => none */
    float qk_norm_eps;          /* 0 => 1e-6 */
    bool qk_norm_before_rope;   /* the norms run before the rotation; false => after it */
    bool checkpoint_core_attention; /* softmax and its products run again in the backward pass:
                                     * te_module_set_checkpoint(core_attention) */
} te_attn_options;

typedef struct te_inference_params te_inference_params; /* the keys and values of earlier calls (KV cache):
                                                         * api/inference.h */

/* Options of one forward call, for every module with attention. Zero means "not given". Tensors are borrowed for the
 * call.
 *
 * The padding masks take the lengths of sequences from cu_seqlens_q and cu_seqlens_kv, or else from attention_mask and
 * attention_mask_q, whose padding lies behind the tokens of each sequence; neither waits for the device. With other
 * masks cu_seqlens are refused, and attention_mask is read with TE_MASK_ARBITRARY alone, as in TransformerEngine. A
 * TransformerLayer's self attention takes cu_seqlens_q for its keys too; its cross attention takes cu_seqlens_q and
 * cu_seqlens_kv. */
typedef struct te_attn_call {
    te_attn_mask attn_mask_type;     /* 0 => the module's own */
    te_window window;                /* window.on false => the module's own */
    te_switch bottom_right_diagonal; /* 0 => the module's own */
    te_tensor *attention_mask;       /* u8, 1 => masked. Padding masks: padding of the keys [b, 1, 1, s], of the queries
                                      * too unless attention_mask_q is given. TE_MASK_ARBITRARY: anything that
                                      * broadcasts to [b, H, s_q, s_kv] */
    te_tensor *attention_mask_q;     /* padding of the queries, u8 [b, 1, 1, s_q]; cross attention needs it beside
                                      * attention_mask */
    te_tensor *cu_seqlens_q, *cu_seqlens_kv;               /* i32 [b + 1], where each sequence starts */
    te_tensor *cu_seqlens_q_padded, *cu_seqlens_kv_padded; /* TE_THD: i32 [b + 1], where each sequence starts in memory,
                                                            * if sequences have padding between them */
    int64_t max_seqlen_q, max_seqlen_kv; /* TE_THD: length of the longest sequence; 0 => the number of all tokens. A
                                          * small number saves work; longer sequences are cut. TransformerEngine's
                                          * default is the longest sequence rounded up to a multiple of 64, for which
                                          * its host waits */
    te_switch pad_between_seqs;      /* are cu_seqlens_q_padded and cu_seqlens_kv_padded read? 0 => on if they are
                                      * given */
    te_attn_bias core_attention_bias_type; /* 0 => none */
    te_tensor *core_attention_bias;  /* B [b or 1, H or 1, s_q or 1, s_kv], of this rank's heads; differentiable */
    te_tensor *alibi_slopes;         /* f32 [H] or [b, H], of this rank's heads; NULL => powers of 2^(-8 / H) */
    bool checkpoint_core_attention;  /* softmax and its products of this call run again in the backward pass */
    te_inference_params *inference_params; /* the cache (borrowed): self attention alone, inside te_no_grad_begin.
                                            * Lengths come from the cache, and causal masks become
                                            * padding_causal_bottom_right */
    const te_score_mod *score_mod;   /* the user's rule for scores and masks; NULL => none. Where the call runs again in
                                      * the backward pass, the texts of score_mod must live until then */
    /* DotProductAttention: qkv_layer, packed [.., 3, H, d], stands in place of input, key and value; kv_layer, packed
     * [.., 2, G, d], in place of key and value. qkv_layer with fewer groups than heads is [.., H + 2 G, d]. The kernels
     * read packed tensors in place and write their gradients as one tensor; under a cache, in FP8 and over ranks q, k
     * and v are first copied apart. */
    te_tensor *qkv_layer, *kv_layer;
    int qkv_interleave_dim;          /* dimension of the 3 or 2 in qkv_layer and kv_layer: -3, or -2 for [.., H, 3, d]
                                      * (with fewer groups than heads [.., G, H / G + 2, d]); 0 => -3 */
} te_attn_call;

/* Options of a decoder's cross attention in one forward call, where they differ from those of its self attention. */
typedef struct te_cross_attention_call {
    te_tensor *enc_dec_attn_mask;            /* as te_attn_call.attention_mask: padding of the encoder's output, or
                                              * the mask of TE_MASK_ARBITRARY */
    te_tensor *enc_dec_attn_mask_q;          /* as te_attn_call.attention_mask_q: padding of the decoder's tokens
                                              * (the first of TransformerEngine's pair enc_dec_attn_mask) */
    te_attn_mask enc_dec_attn_mask_type;     /* 0 => the module's own */
    te_window enc_dec_window;                /* enc_dec_window.on false => the module's own */
    te_switch enc_dec_bottom_right_diagonal; /* 0 => the module's own */
} te_cross_attention_call;
