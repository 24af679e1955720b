/* api/backend.h: which implementation each part of a model uses, as NeMo Automodel chooses it
 * (nemo_automodel.components.models.common.utils). */

/* Attention (api/attention_backends.h). */
typedef enum te_attn_backend {
    TE_ATTN_DEFAULT = 0,  /* te on CUDA, else sdpa */
    TE_ATTN_TE = 1,       /* DotProductAttention */
    TE_ATTN_SDPA = 2,     /* a function of [b, H, s, d] */
    TE_ATTN_FLEX = 3,     /* masks of blocks, kept from call to call; sinks */
    TE_ATTN_EAGER = 4,    /* two products and a softmax */
    TE_ATTN_TILELANG = 5, /* external */
    TE_ATTN_CUDNN = 6,    /* external */
    TE_ATTN_MAGI = 7      /* external */
} te_attn_backend;
/* Linear layers. */
typedef enum te_linear_backend {
    TE_LINEAR_DEFAULT = 0, /* te on CUDA, else torch */
    TE_LINEAR_TORCH = 1,   /* in high precision, whatever recipe is in force */
    TE_LINEAR_TE = 2,      /* Linear */
    TE_LINEAR_QUACK = 3    /* external */
} te_linear_backend;
/* Norms. */
typedef enum te_rms_norm_backend {
    TE_RMS_NORM_DEFAULT = 0,    /* torch_fp32 */
    TE_RMS_NORM_TORCH = 1,      /* the normalised row is rounded to the input's format before the weight multiplies
                                 * it */
    TE_RMS_NORM_TORCH_FP32 = 2, /* Float32RMSNorm: one rounding */
    TE_RMS_NORM_TE = 3,         /* RMSNorm */
    TE_RMS_NORM_QUACK = 4       /* external */
} te_rms_norm_backend;
/* Rotary embeddings. */
typedef enum te_rope_backend {
    TE_ROPE_TORCH = 0, /* te.h's own (te_rotary_embedding) */
    TE_ROPE_QUACK = 1 /* external */
} te_rope_backend;
/* The products of experts. */
typedef enum te_experts_backend {
    TE_EXPERTS_DEFAULT = 0,        /* torch_mm on CUDA, else torch */
    TE_EXPERTS_TORCH = 1,          /* a loop over the experts */
    TE_EXPERTS_TORCH_MM = 2,       /* grouped products, sizes on the device */
    TE_EXPERTS_TORCH_MM_MXFP8 = 3, /* the same in MXFP8 */
    TE_EXPERTS_GMM = 4,            /* grouped products, sizes on the host */
    TE_EXPERTS_TE = 5              /* GroupedLinear */
} te_experts_backend;
/* How tokens travel between ranks. */
typedef enum te_dispatcher_backend {
    TE_DISPATCHER_DEFAULT = 0,  /* deepep on CUDA, else torch */
    TE_DISPATCHER_TORCH = 1,    /* all tokens to all ranks, and a sum of all results */
    TE_DISPATCHER_DEEPEP = 2,   /* all-to-all */
    TE_DISPATCHER_UCCL_EP = 3,  /* all-to-all */
    TE_DISPATCHER_HYBRIDEP = 4, /* all-to-all */
    TE_DISPATCHER_MOK = 5       /* external */
} te_dispatcher_backend;

/* ---- what there is ---- */

/* The packages that Automodel looks for, and the device. They choose defaults, and nothing else asks them. */
typedef struct te_backend_capabilities {
    bool have_te;      /* TransformerEngine: te.h itself */
    bool have_deep_ep; /* an all-to-all of tokens: te.h's own */
    bool have_gmm;     /* grouped products: te.h's own */
    bool have_uccl_ep; /* the same all-to-all under its other name */
    bool cuda;         /* the context runs on a GPU */
} te_backend_capabilities;
/* Those of the context: all of te.h's own, and cuda as te_ctx_is_cuda has it; or what te_backend_set_capabilities has
 * said. All false for NULL.
 * Source: HAVE_TE, HAVE_DEEP_EP, HAVE_GMM, HAVE_UCCL_EP. */
TE_API te_backend_capabilities te_backend_get_capabilities(const te_ctx *te);
/* Says that the context has these (copied), for tests and for the defaults of another machine; NULL => what it really
 * has. */
TE_API void te_backend_set_capabilities(te_ctx *te, const te_backend_capabilities *capabilities);

/* ---- FP8 of a whole model ---- */

/* The recipe of te_fp8_config. */
typedef enum te_fp8_recipe {
    TE_FP8_CURRENT = 0, /* te_recipe_current_scaling */
    TE_FP8_BLOCK = 1,   /* te_recipe_block_scaling */
    TE_FP8_MXFP8 = 2,   /* te_recipe_mxfp8; its codes are multiplied as bf16, of which a warning tells */
    TE_FP8_OBJECT = 3   /* that of `object` */
} te_fp8_recipe;
/* Source: TEFp8Config. */
typedef struct te_fp8_config {
    te_fp8_recipe recipe;    /* 0 => current */
    const te_recipe *object; /* with TE_FP8_OBJECT (borrowed while the config is in use) */
} te_fp8_config;
/* The recipe of a config, in *storage, or `object` itself. NULL without an error if the capabilities have no
 * TransformerEngine, whatever the config says; NULL with TE_ERR_INVALID for a recipe outside of the list, or
 * TE_FP8_OBJECT without an object. MXFP8 logs its warning each time. TEFp8Config.build_recipe. */
TE_API const te_recipe *te_fp8_config_build_recipe(te_ctx *te, const te_fp8_config *config, te_recipe *storage);
/* te_autocast_begin with that recipe, without a group for amaxes. config NULL, or no TransformerEngine: the region
 * changes nothing, so one that is open outside goes on. Around forward and backward of each microbatch, in training and
 * in validation. TEFp8Config.maybe_te_autocast. */
TE_API te_result te_fp8_maybe_autocast_begin(te_ctx *te, const te_fp8_config *config);
/* Closes it: te_autocast_end. */
TE_API te_result te_fp8_maybe_autocast_end(te_ctx *te);
/* Reads "current", "block" or "mxfp8" into *config. Any other name is TE_ERR_INVALID and names the nearest; with
 * unknown_is_current it is current scaling, as in Automodel. */
TE_API te_result te_fp8_config_parse(te_ctx *te, const char *name, bool unknown_is_current, te_fp8_config *config);

/* ---- the config ---- */

/* Of the dispatcher mok, which is external: values are checked and kept. Source: MoKBackendConfig. */
typedef struct te_mok_backend_config {
    int fwd_num_comm_sms;                     /* multiprocessors that communicate in the forward pass, positive and
                                               * even; 0 => 40 */
    int bwd_num_comm_sms;                     /* the same in the backward pass; 0 => 28 */
    int minibatch_size;                       /* tokens, a multiple of 256; 0 => 4096 */
    int macrobatch_size;                      /* tokens, a multiple of minibatch_size; 0 => 131072 */
    double schedule_capacity_multiplier;      /* positive; 0 => 0.5 */
    int all_gather_top_experts_chunk_bytes;   /* a multiple of 16; 0 => 2048 */
} te_mok_backend_config;
/* The parts of a model that run as graphs; bits of te_cuda_graph_config.modules. */
typedef enum te_cuda_graph_module {
    TE_CUDA_GRAPH_ATTN = 1,          /* a layer's attention with its projections */
    TE_CUDA_GRAPH_TE_DPA = 2,        /* its DotProductAttention alone */
    TE_CUDA_GRAPH_MOE_ROUTER = 4,    /* the gate */
    TE_CUDA_GRAPH_MOE_PREPROCESS = 8 /* what the dispatcher hybridep does before it sends */
} te_cuda_graph_module;
/* Source: CudaGraphConfig. */
typedef struct te_cuda_graph_config {
    int modules; /* te_cuda_graph_module or-ed together; 0 => none */
} te_cuda_graph_config;

/* How a model is put together. Zero of every field is Automodel's default, which te_backend_config_validate puts in its
 * place; fields whose default is true begin with no_.
 * Source: nemo_automodel.components.models.common.BackendConfig. */
typedef struct te_backend_config {
    te_attn_backend attn;             /* 0 => te with CUDA, else sdpa */
    te_linear_backend linear;         /* 0 => te with CUDA, else torch */
    te_rms_norm_backend rms_norm;     /* 0 => torch_fp32 */
    te_rope_backend rope;             /* 0 => torch */
    te_switch rope_fusion;            /* for models that make tables: te_rope_freqs in place of te_rope_cos_sin; 0 =>
                                       * off. On is turned off with a warning, as Automodel does, unless: */
    bool keep_rope_fusion;            /* rope_fusion stays what it is, and 0 => on with CUDA. Automodel turns it off so
                                       * that log-probabilities agree with those of transformers and vLLM, whose tables
                                       * are rounded to the model's format; te.h's own modules rotate by f32 cosines and
                                       * sines either way */
    te_experts_backend experts;       /* 0 => torch_mm with CUDA, else torch */
    te_dispatcher_backend dispatcher; /* 0 => with CUDA deepep, or uccl_ep without deepep; else torch */
    int dispatcher_num_sms;           /* multiprocessors that communicate; 0 => 20 */
    bool no_dispatcher_share_token_dispatcher; /* each layer with experts has a manager of communication of its own;
                                                * false => they share one */
    bool dispatcher_async_dispatch;   /* dispatch and combine do not wait for each other's stream; deepep and uccl_ep
                                       * read it */
    te_mok_backend_config mok;        /* of the dispatcher mok */
    te_switch enable_deepep;          /* gone from Automodel: a value is forgotten with a warning, and changes no other
                                       * field */
    bool fake_balanced_gate;          /* tokens go to experts in turn, whatever the router's weights */
    double fake_gate_noise;           /* share of randomness in that; its range is not checked */
    bool no_enable_hf_state_dict_adapter; /* files have the model's own names, not those of transformers */
    bool enable_fsdp_optimizations;   /* gradients of shards are exchanged behind the last microbatch alone */
    bool has_te_fp8;                  /* te_fp8 counts; false => no FP8 */
    te_fp8_config te_fp8;             /* FP8 of the whole model */
    te_dtype gate_precision;          /* of the router's product and scores; 0 => the input's format. te.h has no f64:
                                       * "float64" is refused by te_backend_config_parse */
    bool compile_attn;                /* kept and not read: te.h fuses without being told */
    te_cuda_graph_config cuda_graph;  /* what runs as graphs */
} te_backend_config;

/* A config of defaults alone, each in its place, for such a machine; NULL => one without anything. */
TE_API te_backend_config te_backend_config_defaults(const te_backend_capabilities *capabilities);
/* Puts defaults in the place of zeros, by the context's capabilities, then applies Automodel's rules, in its order:
 *
 *      1  rope quack turns rope_fusion off, with a warning
 *      2  rope_fusion is turned off, with a warning if it was on (keep_rope_fusion: not)
 *      3  te_fp8 is checked           4  cuda_graph is checked: attn and te_dpa exclude each other, moe_preprocess
 *                                        needs moe_router
 *      5  mok is checked              6  gate_precision is checked
 *      7  enable_deepep is forgotten, with a warning
 *      8  experts te or gmm, with a dispatcher that is none of deepep, hybridep, uccl_ep and mok: dispatcher torch and
 *         experts torch_mm, with a message of TE_LOG_INFO
 *      9  cuda_graph: attn and te_dpa need attn te, and a te_fp8 object without fp8_dpa; attn also linear torch,
 *         rms_norm torch and rope_fusion off; moe_router needs fake_balanced_gate off; moe_preprocess needs the
 *         dispatcher hybridep
 *     10  te_fp8 needs linear te or experts te (after rule 8)
 *
 * The messages of rules 7 and 8 come from rank 0 of `group` alone; NULL => from every rank. A value outside of its list
 * is TE_ERR_INVALID before all rules (Automodel fails where it is used). On an error *config is what it was. Whether
 * the chosen implementations exist is not asked: the functions that make modules refuse those that te.h does not
 * have. */
TE_API te_result te_backend_config_validate(te_ctx *te, te_backend_config *config, const te_group *group);

/* Sets the fields that `text` names:
 * "attn=te,linear=torch,rope_fusion=true,te_fp8=block,cuda_graph=attn+moe_router,mok.minibatch_size=512".
 * Names and values are Automodel's ("dispatcher_share_token_dispatcher=false" sets
 * no_dispatcher_share_token_dispatcher), those of a group stand behind its name and a dot; spaces around them do not
 * count, and "cuda_graph=" is the empty list. A name that is not known, given twice, or without a value, and a value
 * that is not possible are TE_ERR_INVALID, with the field, the value, what is possible and the nearest of that; *config
 * is then what it was. Rules are te_backend_config_validate's. */
TE_API te_result te_backend_config_parse(te_ctx *te, const char *text, te_backend_config *config);
/* The name of field `index` of those that te_backend_config_parse reads, from 0 on (static), and its values into
 * `values` (truncated to fit; may be NULL): "te, sdpa, flex", or "a whole number", "a number". NULL outside of the
 * list. */
TE_API const char *te_backend_config_field(int index, char *values, size_t size);
/* Writes the fields that are not zero as te_backend_config_parse reads them (te_fp8 with an object as "object", which
 * it does not read) into buffer (truncated to fit); returns the length of the whole text. */
TE_API size_t te_backend_config_print(const te_backend_config *config, char *buffer, size_t size);
/* The value of one name, of the field "attn", "linear", "rms_norm", "rope", "experts" or "dispatcher", into *value, as
 * its enumerator. Errors as te_backend_config_parse. */
TE_API te_result te_backend_parse(te_ctx *te, const char *field, const char *name, int *value);
/* The name of a value of such a field (static); "default" for its 0, unless that has a name; "?" outside of the list,
 * and for another field. */
TE_API const char *te_backend_name(const char *field, int value);

/* ---- modules by backend ---- */

/* Options of te_initialize_linear_module. */
typedef struct te_linear_module_desc {
    te_linear_backend linear_impl;     /* 0 => te with CUDA, else torch */
    int64_t in_features, out_features; /* last sizes of x and y; at least 1 */
    bool bias;                         /* with a bias */
    te_params_device device;           /* of parameters; 0 => the context's */
    te_dtype dtype;                    /* of parameters: f32, f16 or bf16; 0 => bf16 */
    te_init init;                      /* of the weight, and a bias of zeros; zero => the class's own first values */
    const char *name;                  /* copied; NULL => "linear" */
} te_linear_module_desc;
/* y = x W^T + b: te: Linear. torch: in high precision whatever recipe is in force, never stored quantized, weight and
 * bias beginning uniform on [-1 / sqrt(in), 1 / sqrt(in)] (torch.nn.Linear). Parameters: weight [out, in], bias [out].
 * TE_ERR_UNSUPPORTED for quack, TE_ERR_INVALID outside of the list.
 * Source: initialize_linear_module. */
TE_API te_module *te_initialize_linear_module(te_ctx *te, const te_linear_module_desc *desc);

/* Options of te_initialize_rms_norm_module and te_float32_rms_norm_create. */
typedef struct te_rms_norm_module_desc {
    te_rms_norm_backend rms_norm_impl; /* 0 => torch_fp32; not read by te_float32_rms_norm_create */
    int64_t dim;                       /* last size of x; at least 1 */
    float eps;                         /* added to the mean square; 0 => 1e-5 */
    te_params_device device;           /* of the weight; 0 => the context's */
    te_dtype dtype;                    /* of the weight: f32, f16 or bf16; 0 => bf16 */
    const char *name;                  /* copied; NULL => "rmsnorm" */
} te_rms_norm_module_desc;
/* x / sqrt(mean of squares + eps) * weight: te: RMSNorm. torch_fp32: Float32RMSNorm, which is the same numbers;
 * autocast quantizes neither, but inside a Sequential a product behind a te norm reads its codes. torch: the normalised
 * row is rounded to x's format before the weight multiplies it (torch.nn.RMSNorm, transformers' LlamaRMSNorm); its
 * gradient is that of the unrounded formula, in f32. Every backend runs te_op_rmsnorm_fwd and _bwd. Parameter: weight
 * [dim], ones. TE_ERR_UNSUPPORTED for quack, TE_ERR_INVALID outside of the list.
 * Source: initialize_rms_norm_module. */
TE_API te_module *te_initialize_rms_norm_module(te_ctx *te, const te_rms_norm_module_desc *desc);
/* Float32RMSNorm: te_float32_rms_norm with a weight of any format. */
TE_API te_module *te_float32_rms_norm_create(te_ctx *te, const te_rms_norm_module_desc *desc);
/* weight * x / sqrt(mean(x^2) + eps) over the last dimension of x [.., N], in f32 throughout and rounded once, to x's
 * format; weight [N] of any float format. Gradients: with s = 1 / sqrt(..), n = x s, g = dy weight: dx = s (g - n
 * mean(g n)), dweight = the sum over rows of dy n, each summed in f32 and rounded once. eps 0 => 1e-5. Differentiable;
 * allocates. te_rmsnorm by another name. Source: _float32_rms_norm_fwd. */
TE_API te_tensor *te_float32_rms_norm(te_tensor *x, te_tensor *weight, float eps);

/* ---- shapes without memory ---- */

/* Has x no memory: NULL, or of te_tensor_describe (a META tensor)? Linear, LayerNorm, RMSNorm and the modules above
 * answer such an input with a described output of its format and launch nothing, so a model can be asked for its
 * shapes; TE_ERR_SHAPE for another number of columns. Other modules refuse it (TE_ERR_STATE). A tensor with a size of 0
 * is real: it goes the usual way, gradients included.
 * Source: is_tensor_unallocated, and the lazy patcher of TransformerEngine's classes. */
TE_API bool te_is_tensor_unallocated(const te_tensor *x);
/* on: tensors without elements count as unallocated too, as in Automodel: Linear and RMSNorm then give a new empty
 * tensor without history. Off by default. */
TE_API void te_set_empty_is_unallocated(te_ctx *te, bool on);

/* ---- the place in a step ---- */

/* The microbatch of calls of Linear and GroupedLinear that do not give is_first_microbatch; one that is given counts.
 * NONE by default. The kept weights notice every write, so LATER after an optimizer's step quantizes them anew
 * (Automodel multiplies by the old ones). Source: IS_FIRST_MICROBATCH. */
TE_API void te_set_is_first_microbatch(te_ctx *te, te_microbatch value);
TE_API te_microbatch te_get_is_first_microbatch(const te_ctx *te); /* NONE for NULL */
/* Is the next backward pass the last one of its step? False by default. Source: IS_OPTIM_STEP. */
TE_API void te_set_is_optim_step(te_ctx *te, bool value);
TE_API bool te_get_is_optim_step(const te_ctx *te); /* false for NULL */

/* Called for a part of a model by the functions below; `user` is the struct's. Each may be NULL. Returns TE_OK, or an
 * error's code. */
typedef struct te_step_hooks {
    te_result (*prepare_for_grad_accumulation)(te_module *part, void *user); /* before the first microbatch of a step */
    te_result (*prepare_for_final_backward)(te_module *part, void *user);    /* before the last one */
    void *user; /* handed to both; borrowed */
} te_step_hooks;
/* Gives a module its hooks (borrowed for its lifetime; NULL takes them away). */
TE_API te_result te_module_set_step_hooks(te_module *m, const te_step_hooks *hooks);
/* Before the first microbatch of a step: is_optim_step false, is_first_microbatch FIRST; then, unless pp_enabled, the
 * hooks of parts[0 .. num_parts - 1] (borrowed for the call; a NULL is passed over). The first hook that fails ends it
 * with its code. */
TE_API te_result te_prepare_for_grad_accumulation(te_ctx *te, te_module *const *parts, int num_parts, bool pp_enabled);
/* Before the last microbatch: is_optim_step true; then the hooks likewise. */
TE_API te_result te_prepare_for_final_backward(te_ctx *te, te_module *const *parts, int num_parts, bool pp_enabled);
/* After forward and backward of the first microbatch: is_first_microbatch LATER. */
TE_API void te_prepare_after_first_microbatch(te_ctx *te);

/* ---- rotary embeddings ---- */

/* The rotary embedding of a model, as its config.json has it. Numbers that it does not give are 0. */
typedef struct te_rope_config {
    double rope_theta;            /* the base */
    double partial_rotary_factor; /* the share of a head's channels that are rotated; 1 where it is not given */
    const char *rope_parameters;  /* the object that these were read from, in the caller's text (borrowed); NULL: there
                                   * is none */
    size_t rope_parameters_size;  /* its bytes */
    char rope_type[32];           /* "yarn" ...; "" where it is not given */
    /* of the types, by these names */
    double factor, beta_fast, beta_slow, mscale, mscale_all_dim, attention_factor, low_freq_factor, high_freq_factor;
    bool no_truncate;             /* "truncate": false */
    int64_t original_max_position_embeddings, max_position_embeddings; /* the second is the config's own */
    int num_short_factors, num_long_factors;                                   /* lengths of the two lists below */
    /* factors of each pair's frequency, for short and for long sequences (longrope) */
    float short_factor[TE_MAX_ROPE_FACTORS], long_factor[TE_MAX_ROPE_FACTORS];
} te_rope_config;
/* Reads "rope_parameters" of `config`, the text of a config.json. No older key takes their place. TE_ERR_FORMAT if they
 * are missing or null, if they have no rope_theta, or for a number that is given as something else. Source:
 * get_rope_config. */
TE_API te_result te_get_rope_config(te_ctx *te, const char *config, te_rope_config *rope);
/* The same as models of the Llama family do it: "rope_parameters", or "rope_scaling", or none; without a rope_theta
 * there, that of `config`, else 10000. */
TE_API te_result te_get_llama_rope_config(te_ctx *te, const char *config, te_rope_config *rope);
/* Fills *rotary as Automodel's models with experts rotate, whatever rope_type says: with a factor above 1 frequencies
 * are YaRN's, between pairs that need not be whole numbers, with beta_fast (0 => 32), beta_slow (0 => 1) and
 * original_max_position_embeddings (0 => 4096); attention_factor 0.1 ln(factor) + 1. Else they stay as they are.
 * TE_ERR_INVALID unless 0 < low < high < dim / 2 - 1 for the two pairs of YaRN, dim = floor(head_dim *
 * partial_rotary_factor) even. Source: gpt_oss RotaryEmbedding. */
TE_API te_result te_rope_config_moe_rotary(te_ctx *te, const te_rope_config *rope, int head_dim,
                                           te_rotary_desc *rotary);
/* Fills *rotary by rope_type, as transformers does: default, linear, dynamic, llama3, yarn, longrope (its lists are
 * read from *rope, which must live as long as the desc is used).
 * TE_ERR_INVALID for another name, with the nearest, TE_ERR_FORMAT for a number that the type needs and that is missing
 * or out of range. */
TE_API te_result te_rope_config_llama_rotary(te_ctx *te, const te_rope_config *rope, int head_dim,
                                             te_rotary_desc *rotary);

/* Tables of rotary embeddings, for models that rotate by themselves; te_apply_rotary_pos_emb and modules need none. Of
 * *rotary (NULL => defaults) they read base, rotary_percent, scaling and max_seqlen (0 => the largest position + 1);
 * dim = floor(head_dim * rotary_percent), even, or 0 for a table without columns. Frequencies are made anew each time,
 * so no rounded copy of a model changes them. Each computes on the host and allocates; NULL with TE_ERR_INVALID for
 * sizes that are not possible, or a negative position.
 *
 * f32 [n, dim]: the cosines of all pairs and behind them the sines, times the attention factor, of positions[0 .. n -
 * 1] (borrowed for the call; NULL => 0 .. n - 1). */
TE_API te_tensor *te_rope_cos_sin(te_ctx *te, const te_rotary_desc *rotary, int head_dim, const int64_t *positions,
                                  int64_t n);
/* f32 [n, 1, 1, dim]: the angles of all pairs, each twice as rotary->interleaved has its channels, of positions 0 .. n
 * - 1, for a fused rotation (te_rotary_desc.freqs; rotary_pos_emb of TransformerEngine); *attention_factor (may be
 * NULL) is for the caller to multiply queries and keys by after the rotation. */
TE_API te_tensor *te_rope_freqs(te_ctx *te, const te_rotary_desc *rotary, int head_dim, int64_t n,
                                float *attention_factor);
