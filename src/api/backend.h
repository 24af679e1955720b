/* api/backend.h: which implementation each part of a model uses, as NeMo Automodel chooses it
 * (nemo_automodel.components.models.common.utils). */

/* ---- what there is ---- */

/* The packages that Automodel looks for, and the device. They decide defaults and nothing else. */
typedef struct te_backend_capabilities {
    bool have_te;      /* TransformerEngine: te.h itself */
    bool have_deep_ep; /* an all-to-all of tokens: te.h's own */
    bool have_gmm;     /* grouped products: te.h's own */
    bool have_uccl_ep; /* the all-to-all of have_deep_ep under its other name */
    bool cuda;         /* the context runs on a GPU */
} te_backend_capabilities;
/* Returns the capabilities that te_backend_set_capabilities has set; without such a call all of te.h's own, and cuda by
 * te_ctx_is_cuda. All false for NULL.
 * Source: HAVE_TE, HAVE_DEEP_EP, HAVE_GMM, HAVE_UCCL_EP. */
TE_API te_backend_capabilities te_backend_get_capabilities(const te_ctx *te);
/* Sets the capabilities of the context (copied), for tests and for the defaults of another machine; NULL => the real
 * ones again. */
TE_API void te_backend_set_capabilities(te_ctx *te, const te_backend_capabilities *capabilities);

/* ---- FP8 of a whole model ---- */

/* The recipe of te_fp8_config. */
typedef enum te_fp8_recipe {
    TE_FP8_CURRENT = 0, /* te_recipe_current_scaling */
    TE_FP8_BLOCK = 1,   /* te_recipe_block_scaling */
    TE_FP8_MXFP8 = 2,   /* te_recipe_mxfp8; its codes are multiplied as bf16, which a warning says */
    TE_FP8_OBJECT = 3   /* the recipe in te_fp8_config.object */
} te_fp8_recipe;
/* FP8 of a whole model. Source: TEFp8Config. */
typedef struct te_fp8_config {
    te_fp8_recipe recipe;    /* 0 => current */
    const te_recipe *object; /* with TE_FP8_OBJECT (borrowed while the config is in use) */
} te_fp8_config;
/* Returns the recipe of a config: *storage, which it fills, or `object`. NULL without an error if the capabilities have
 * no TransformerEngine, whatever the config says; NULL with TE_ERR_INVALID for a recipe outside the list, or
 * TE_FP8_OBJECT without an object. MXFP8 logs its warning each time. TEFp8Config.build_recipe. */
TE_API const te_recipe *te_fp8_config_build_recipe(te_ctx *te, const te_fp8_config *config, te_recipe *storage);
/* Runs te_autocast_begin with the recipe of the config, without a group for amaxes. config NULL, or no
 * TransformerEngine: the region changes nothing, so an outer region stays in force. For forward and backward of each
 * microbatch, in training and in validation. TEFp8Config.maybe_te_autocast. */
TE_API te_result te_fp8_maybe_autocast_begin(te_ctx *te, const te_fp8_config *config);
/* Closes the region of te_fp8_maybe_autocast_begin: te_autocast_end. */
TE_API te_result te_fp8_maybe_autocast_end(te_ctx *te);
/* Reads "current", "block" or "mxfp8" into *config. Any other name gives TE_ERR_INVALID with the nearest name; with
 * unknown_is_current it means current scaling, as in Automodel. */
TE_API te_result te_fp8_config_parse(te_ctx *te, const char *name, bool unknown_is_current, te_fp8_config *config);

/* ---- the config ---- */

/* Options of the dispatcher mok, which is external: values are checked and kept. Source: MoKBackendConfig. */
typedef struct te_mok_backend_config {
    int fwd_num_comm_sms;                     /* multiprocessors that communicate in the forward pass, positive and
                                               * even; 0 => 40 */
    int bwd_num_comm_sms;                     /* multiprocessors that communicate in the backward pass, positive and
                                               * even; 0 => 28 */
    int minibatch_size;                       /* tokens, a multiple of 256; 0 => 4096 */
    int macrobatch_size;                      /* tokens, a multiple of minibatch_size; 0 => 131072 */
    double schedule_capacity_multiplier;      /* positive; 0 => 0.5 */
    int all_gather_top_experts_chunk_bytes;   /* a multiple of 16; 0 => 2048 */
} te_mok_backend_config;
/* The parts of a model that run as graphs; bits of te_cuda_graph_config.modules. */
typedef enum te_cuda_graph_module {
    TE_CUDA_GRAPH_ATTN = 1,          /* a layer's attention with its projections */
    TE_CUDA_GRAPH_TE_DPA = 2,        /* a layer's DotProductAttention alone */
    TE_CUDA_GRAPH_MOE_ROUTER = 4,    /* the gate */
    TE_CUDA_GRAPH_MOE_PREPROCESS = 8 /* what the dispatcher hybridep does before it sends */
} te_cuda_graph_module;
/* Chooses the parts of a model that run as CUDA graphs. Source: CudaGraphConfig. */
typedef struct te_cuda_graph_config {
    int modules; /* te_cuda_graph_module or-ed together; 0 => none */
} te_cuda_graph_config;

/* How a model is put together. Zero in any field means Automodel's default; te_backend_config_validate replaces the
 * zero by that default. Fields whose default is true begin with no_.
 * Source: nemo_automodel.components.models.common.BackendConfig. */
typedef struct te_backend_config {
    te_attn_backend attn;             /* 0 => te with CUDA, else sdpa */
    te_linear_backend linear;         /* 0 => te with CUDA, else torch */
    te_rms_norm_backend rms_norm;     /* 0 => torch_fp32 */
    te_rope_backend rope;             /* 0 => torch */
    te_switch rope_fusion;            /* for models that make tables: te_rope_freqs (on) or te_rope_cos_sin (off); 0 =>
                                       * off. te_backend_config_validate turns "on" off with a warning, as Automodel
                                       * does, unless keep_rope_fusion is set */
    bool keep_rope_fusion;            /* rope_fusion keeps its value, and its 0 means on with CUDA. Automodel turns
                                       * rope_fusion off so that log-probabilities agree with those of transformers and
                                       * vLLM, whose tables are rounded to the model's format; te.h's own modules rotate
                                       * by f32 cosines and sines in both cases */
    te_experts_backend experts;       /* 0 => torch_mm with CUDA, else torch */
    te_dispatcher_backend dispatcher; /* 0 => with CUDA deepep, or uccl_ep without deepep; else torch */
    int dispatcher_num_sms;           /* multiprocessors that communicate; 0 => 20 */
    bool no_dispatcher_share_token_dispatcher; /* each layer with experts has its own manager of communication; false =>
                                                * all layers share one */
    bool dispatcher_async_dispatch;   /* dispatch and combine do not wait for each other's stream; deepep and uccl_ep
                                       * read it */
    te_mok_backend_config mok;        /* options of the dispatcher mok */
    te_switch enable_deepep;          /* removed from Automodel: a value is reset to 0 with a warning, and changes no
                                       * other field */
    bool fake_balanced_gate;          /* tokens go to experts in turn, whatever the router's weights */
    double fake_gate_noise;           /* with fake_balanced_gate: share of randomness in the choice; its range is not
                                       * checked */
    bool no_hf_state_dict_adapter; /* files have the model's own names; false => those of transformers */
    bool enable_fsdp_optimizations;   /* gradients of shards are exchanged behind the last microbatch alone; false =>
                                       * behind each */
    bool has_te_fp8;                  /* te_fp8 is used; false => no FP8 */
    te_fp8_config te_fp8;             /* FP8 of the whole model */
    te_dtype gate_precision;          /* format of the router's product and scores; 0 => the input's format. te.h has no
                                       * f64: te_backend_config_parse refuses "float64" */
    bool compile_attn;                /* kept and not read: te.h fuses without being told */
    te_cuda_graph_config cuda_graph;  /* what runs as graphs */
} te_backend_config;

/* Returns a config with every field at its default for such a machine; capabilities NULL => a machine with none of
 * them. */
TE_API te_backend_config te_backend_config_defaults(const te_backend_capabilities *capabilities);
/* Replaces zeros by defaults, by the context's capabilities, then applies Automodel's rules, in its order:
 *
 *      1  rope quack turns rope_fusion off, with a warning
 *      2  rope_fusion is turned off, with a warning if it was on (not with keep_rope_fusion)
 *      3  te_fp8 is checked           4  cuda_graph is checked: attn and te_dpa exclude each other, moe_preprocess
 *                                        needs moe_router
 *      5  mok is checked              6  gate_precision is checked
 *      7  enable_deepep is reset to 0, with a warning
 *      8  experts te or gmm, with a dispatcher that is none of deepep, hybridep, uccl_ep and mok: dispatcher torch and
 *         experts torch_mm, with a message of TE_LOG_INFO
 *      9  cuda_graph: attn and te_dpa need attn te, and a te_fp8 object without fp8_dpa; attn also linear torch,
 *         rms_norm torch and rope_fusion off; moe_router needs fake_balanced_gate off; moe_preprocess needs the
 *         dispatcher hybridep
 *     10  te_fp8 needs linear te or experts te (after rule 8)
 *
 * Rank 0 of `group` alone logs the messages of rules 7 and 8; group NULL => every rank does. A value outside its list
 * gives TE_ERR_INVALID before all rules (Automodel fails where the value is used). On an error *config is what it was.
 * Whether the chosen implementations exist is not checked: the functions that make modules refuse those that te.h does
 * not have. */
TE_API te_result te_backend_config_validate(te_ctx *te, te_backend_config *config, const te_group *group);

/* Sets the fields that `text` names:
 * "attn=te,linear=torch,rope_fusion=true,te_fp8=block,cuda_graph=attn+moe_router,mok.minibatch_size=512".
 * Names and values are Automodel's ("dispatcher_share_token_dispatcher=false" sets
 * no_dispatcher_share_token_dispatcher). A field of a group stands behind the group's name and a dot. Spaces around
 * names and values are ignored, and "cuda_graph=" is the empty list. A name that is unknown, given twice, or without a
 * value, and a value that is not possible give TE_ERR_INVALID with the field, the value, the possible values and the
 * nearest of them; *config is then what it was. The rules of te_backend_config_validate are not applied. */
TE_API te_result te_backend_config_parse(te_ctx *te, const char *text, te_backend_config *config);
/* Returns the name of field `index` of those that te_backend_config_parse reads, from 0 on (static); NULL outside the
 * list. Writes the field's values into `values` (truncated to fit; may be NULL): "te, sdpa, flex", or "a whole number",
 * "a number". */
TE_API const char *te_backend_config_field(int index, char *values, size_t size);
/* Writes the fields that are not zero into buffer (truncated to fit), in the form that te_backend_config_parse reads; a
 * te_fp8 with an object becomes "object", which te_backend_config_parse does not read. Returns the length of the whole
 * text. */
TE_API size_t te_backend_config_print(const te_backend_config *config, char *buffer, size_t size);
/* Reads one name of the field "attn", "linear", "rms_norm", "rope", "experts" or "dispatcher" into *value, as its
 * enumerator. Errors as te_backend_config_parse. */
TE_API te_result te_backend_parse(te_ctx *te, const char *field, const char *name, int *value);
/* Returns the name of a value of a field that te_backend_parse reads (static); "default" for 0, unless the field's 0
 * has a name; "?" for a value outside the list, and for another field. */
TE_API const char *te_backend_name(const char *field, int value);

/* ---- modules by backend ---- */

/* Options of te_initialize_linear_module. */
typedef struct te_linear_module_desc {
    te_linear_backend linear_impl;     /* 0 => te with CUDA, else torch */
    int64_t in_features, out_features; /* last sizes of x and y; at least 1 */
    bool bias;                         /* with a bias; false => none, as in Automodel. The default of
                                        * TransformerEngine's and of torch's Linear is a bias */
    te_params_device device;           /* of parameters; 0 => the context's */
    te_dtype dtype;                    /* of parameters: f32, f16 or bf16; 0 => bf16 */
    te_init init;                      /* of the weight, then with a bias of zeros; zero => the class's own first
                                        * values */
    const char *name;                  /* copied; NULL => "linear" */
} te_linear_module_desc;
/* Makes a module y = x W^T + b. te: Linear. torch: a product in high precision whatever recipe is in force, never
 * stored quantized, whose weight and bias start uniform on [-1 / sqrt(in), 1 / sqrt(in)] (torch.nn.Linear). Parameters:
 * weight [out, in], bias [out]. TE_ERR_UNSUPPORTED for quack, TE_ERR_INVALID outside the list.
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
/* Makes a module x / sqrt(mean of squares + eps) * weight. Parameter: weight [dim], ones. Every backend runs
 * te_op_rmsnorm_fwd and _bwd:
 *   te          RMSNorm; inside a Sequential the product behind it reads its quantized output
 *   torch_fp32  Float32RMSNorm: the numbers of te; autocast quantizes neither
 *   torch       the normalised row is rounded to x's format before the weight multiplies it (torch.nn.RMSNorm,
 *               transformers' LlamaRMSNorm); the gradient is that of the unrounded formula, in f32
 * TE_ERR_UNSUPPORTED for quack, TE_ERR_INVALID outside the list.
 * Source: initialize_rms_norm_module. */
TE_API te_module *te_initialize_rms_norm_module(te_ctx *te, const te_rms_norm_module_desc *desc);
/* Makes a Float32RMSNorm: te_float32_rms_norm with a weight of any format. */
TE_API te_module *te_float32_rms_norm_create(te_ctx *te, const te_rms_norm_module_desc *desc);
/* Returns weight * x / sqrt(mean(x^2) + eps) over the last dimension of x [.., N], in f32 throughout and rounded once,
 * to x's format; weight [N] of any float format; eps 0 => 1e-5. Gradients, with s = 1 / sqrt(mean(x^2) + eps), n = x s,
 * g = dy weight: dx = s (g - n mean(g n)), dweight = the sum over rows of dy n, each summed in f32 and rounded once.
 * Differentiable; allocates. te_rmsnorm by another name. Source: _float32_rms_norm_fwd. */
TE_API te_tensor *te_float32_rms_norm(te_tensor *x, te_tensor *weight, float eps);

/* ---- shapes without memory ---- */

/* Is x NULL, or a tensor of te_tensor_describe (a META tensor)? Linear, LayerNorm, RMSNorm and the modules above answer
 * such an input with a described output of its format and launch nothing, so that a model can be asked for its shapes;
 * TE_ERR_SHAPE for another number of columns. Other modules refuse it (TE_ERR_STATE). A tensor with a size of 0 is
 * allocated: modules run it as usual, gradients included.
 * Source: is_tensor_unallocated, and the lazy patcher of TransformerEngine's classes. */
TE_API bool te_is_tensor_unallocated(const te_tensor *x);
/* on: tensors without elements count as unallocated too, as in Automodel: Linear and RMSNorm then return a new empty
 * tensor without history. Off by default. */
TE_API void te_set_empty_is_unallocated(te_ctx *te, bool on);

/* ---- rotary embeddings ---- */

/* The rotary embedding of a model, as its config.json gives it. A number that the file does not give is 0 unless said
 * otherwise. */
typedef struct te_rope_config {
    double rope_theta;            /* the base */
    double partial_rotary_factor; /* the share of a head's channels that are rotated; 1 where it is not given */
    const char *rope_parameters;  /* the JSON object that the fields were read from, in the caller's text (borrowed);
                                   * NULL: there is none */
    size_t rope_parameters_size;  /* bytes of rope_parameters */
    char rope_type[32];           /* "yarn" ...; "" where it is not given */
    /* the numbers of the types, under the names of config.json */
    double factor, beta_fast, beta_slow, mscale, mscale_all_dim, attention_factor, low_freq_factor, high_freq_factor;
    bool no_truncate;             /* "truncate" is false */
    int64_t original_max_position_embeddings, max_position_embeddings; /* both of the config itself; where it lacks
                                                                        * original_max_position_embeddings, that of the
                                                                        * object */
    int num_short_factors, num_long_factors;                                   /* lengths of short_factor and
                                                                                * long_factor */
    /* longrope: factors of each pair's frequency, for short and for long sequences */
    float short_factor[TE_MAX_ROPE_FACTORS], long_factor[TE_MAX_ROPE_FACTORS];
} te_rope_config;
/* Reads "rope_parameters" of `config`, the text of a config.json, into *rope. Older keys are not read in its place.
 * TE_ERR_FORMAT if "rope_parameters" is missing or null, or has no rope_theta, or for a number that is given as
 * something else. Source: get_rope_config. */
TE_API te_result te_rope_config_read(te_ctx *te, const char *config, te_rope_config *rope);
/* Reads a config.json as models of the Llama family do: "rope_parameters", or else "rope_scaling", or neither; a
 * rope_theta that the object lacks is that of `config`, or else 10000. Errors as te_rope_config_read. */
TE_API te_result te_rope_config_read_llama(te_ctx *te, const char *config, te_rope_config *rope);
/* Fills *rotary as Automodel's models with experts rotate, whatever rope_type says. With a factor above 1 frequencies
 * are YaRN's, interpolated between two pair numbers low and high that may be fractions, with beta_fast (0 => 32),
 * beta_slow (0 => 1) and original_max_position_embeddings (0 => 4096); attention_factor is 0.1 ln(factor) + 1.
 * Otherwise frequencies stay unchanged. TE_ERR_INVALID unless 0 < low < high < dim / 2 - 1, with dim = floor(head_dim *
 * partial_rotary_factor) even. Source: gpt_oss RotaryEmbedding. */
TE_API te_result te_rope_config_moe_rotary(te_ctx *te, const te_rope_config *rope, int head_dim,
                                           te_rotary_desc *rotary);
/* Fills *rotary by rope_type, as transformers does: default, linear, dynamic, llama3, yarn, longrope (its lists stay in
 * *rope, which must live as long as the desc is used). TE_ERR_INVALID for another name (the message has the nearest
 * one); TE_ERR_FORMAT for a number that the type needs and that is missing or out of range. */
TE_API te_result te_rope_config_llama_rotary(te_ctx *te, const te_rope_config *rope, int head_dim,
                                             te_rotary_desc *rotary);

/* Makes a table of cosines and sines for a model that rotates by itself (te_apply_rotary_pos_emb and modules need no
 * table): f32 [n, dim], the cosines of all pairs and behind them the sines, times the attention factor, for positions[0
 * .. n - 1] (borrowed for the call; NULL => 0 .. n - 1).
 *
 * te_rope_cos_sin and te_rope_freqs read from *rotary (NULL => defaults) base, rotary_percent, scaling and max_seqlen
 * (0 => the largest position + 1). dim = floor(head_dim * rotary_percent), even, or 0 for a table without columns. Each
 * call computes the frequencies anew, so no rounded copy in a model changes them. Both compute on the host and
 * allocate; NULL with TE_ERR_INVALID for sizes that are not possible, or a negative position. */
TE_API te_tensor *te_rope_cos_sin(te_ctx *te, const te_rotary_desc *rotary, int head_dim, const int64_t *positions,
                                  int64_t n);
/* Makes a table of angles for a fused rotation (te_rotary_desc.freqs; rotary_pos_emb of TransformerEngine): f32 [n, 1,
 * 1, dim], the angle of every pair, twice, in the order of rotary->interleaved's channels, for positions 0 .. n - 1.
 * The caller multiplies queries and keys by *attention_factor (may be NULL) after the rotation. Fields, sizes and
 * errors as te_rope_cos_sin. */
TE_API te_tensor *te_rope_freqs(te_ctx *te, const te_rotary_desc *rotary, int head_dim, int64_t n,
                                float *attention_factor);
