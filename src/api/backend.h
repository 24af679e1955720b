/* api/backend.h: the choice of an implementation ("backend") for each part of a model, as in NeMo Automodel
 * (nemo_automodel.components.models.common.utils). */

/* ---- what there is ---- */

/* The packages that Automodel would find, and the context's device. They decide the defaults of te_backend_config.
 * Without have_te, te_fp8_config selects no recipe. */
typedef struct te_backend_capabilities {
    bool have_te;      /* TransformerEngine, which is te.h itself */
    bool have_deep_ep; /* DeepEP, an all-to-all of tokens; te.h has its own */
    bool have_gmm;     /* grouped GEMMs; te.h has its own */
    bool have_uccl_ep; /* UCCL-EP, an all-to-all of tokens; te.h has its own, the same as for DeepEP */
    bool cuda;         /* the context runs on a GPU */
} te_backend_capabilities;
/* Returns the capabilities that te_backend_set_capabilities has set. By default all have_ fields are true, and `cuda`
 * is te_ctx_is_cuda. All fields are false if te is NULL.
 * Source: HAVE_TE, HAVE_DEEP_EP, HAVE_GMM, HAVE_UCCL_EP. */
TE_API te_backend_capabilities te_backend_get_capabilities(const te_ctx *te);
/* Sets the capabilities of the context (copied), for instance those of another machine. NULL restores the real ones. */
TE_API void te_backend_set_capabilities(te_ctx *te, const te_backend_capabilities *capabilities);

/* ---- FP8 of a whole model ---- */

/* Selects the recipe of te_fp8_config. */
typedef enum te_fp8_recipe {
    TE_FP8_CURRENT = 0, /* te_recipe_current_scaling */
    TE_FP8_BLOCK = 1,   /* te_recipe_block_scaling */
    TE_FP8_MXFP8 = 2,   /* te_recipe_mxfp8. Its codes are decoded to bf16 for the GEMMs; a warning says so */
    TE_FP8_OBJECT = 3   /* the recipe in te_fp8_config.object */
} te_fp8_recipe;
/* FP8 of a whole model. Source: TEFp8Config. */
typedef struct te_fp8_config {
    te_fp8_recipe recipe;    /* 0 => current */
    const te_recipe *object; /* read with TE_FP8_OBJECT (borrowed while the config is in use) */
} te_fp8_config;
/* Returns the recipe that a config selects: `storage`, which the call fills, or the config's `object`.
 * Returns NULL without an error if have_te of te_backend_get_capabilities is false.
 * TE_FP8_MXFP8 logs a warning in every call.
 * TE_ERR_INVALID if config->recipe is outside its enum, or for TE_FP8_OBJECT with config->object NULL.
 * Source: TEFp8Config.build_recipe. */
TE_API const te_recipe *te_fp8_config_build_recipe(te_ctx *te, const te_fp8_config *config, te_recipe *storage);
/* Runs te_autocast_begin with the recipe of the config and no amax reduction group. If config is NULL, or have_te of
 * te_backend_get_capabilities is false, the new region has the settings of the outer one.
 * Source: TEFp8Config.maybe_te_autocast. */
TE_API te_result te_fp8_maybe_autocast_begin(te_ctx *te, const te_fp8_config *config);
/* Closes the region of te_fp8_maybe_autocast_begin. The same as te_autocast_end. */
TE_API te_result te_fp8_maybe_autocast_end(te_ctx *te);
/* Reads "current", "block" or "mxfp8" into *config. unknown_is_current true => any other name means current scaling, as
 * in Automodel; false => TE_ERR_INVALID, and the message has the nearest name. */
TE_API te_result te_fp8_config_parse(te_ctx *te, const char *name, bool unknown_is_current, te_fp8_config *config);

/* ---- the config ---- */

/* Options of the dispatcher "mok", which te.h does not have. They are checked and kept, but have no effect. Source:
 * MoKBackendConfig. */
typedef struct te_mok_backend_config {
    int fwd_num_comm_sms;                     /* number of multiprocessors that communicate in the forward pass,
                                               * positive and even; 0 => 40 */
    int bwd_num_comm_sms;                     /* number of multiprocessors that communicate in the backward pass,
                                               * positive and even; 0 => 28 */
    int minibatch_size;                       /* number of tokens, a multiple of 256; 0 => 4096 */
    int macrobatch_size;                      /* number of tokens, a multiple of minibatch_size; 0 => 131072 */
    double schedule_capacity_multiplier;      /* positive; 0 => 0.5 */
    int all_gather_top_experts_chunk_bytes;   /* a multiple of 16; 0 => 2048 */
} te_mok_backend_config;
/* The parts of a model that run as graphs; bits of te_cuda_graph_config.modules. */
typedef enum te_cuda_graph_module {
    TE_CUDA_GRAPH_ATTN = 1,          /* a layer's attention with its projections */
    TE_CUDA_GRAPH_TE_DPA = 2,        /* a layer's DotProductAttention, without its projections */
    TE_CUDA_GRAPH_MOE_ROUTER = 4,    /* the router (gate) of the experts */
    TE_CUDA_GRAPH_MOE_PREPROCESS = 8 /* work of the dispatcher "hybridep" before it sends */
} te_cuda_graph_module;
/* Chooses the parts of a model that run as CUDA graphs. Source: CudaGraphConfig. */
typedef struct te_cuda_graph_config {
    int modules; /* te_cuda_graph_module bits, or-ed together; 0 => none */
} te_cuda_graph_config;

/* The implementation of each part of a model. Zero in any field means Automodel's default, which
 * te_backend_config_validate fills in. Fields that are true by default in Automodel begin with no_ here and have the
 * opposite value.
 * Source: nemo_automodel.components.models.common.BackendConfig. */
typedef struct te_backend_config {
    te_attn_backend attn;             /* 0 => te with CUDA, else sdpa */
    te_linear_backend linear;         /* 0 => te with CUDA, else torch */
    te_rms_norm_backend rms_norm;     /* 0 => torch_fp32 */
    te_rope_backend rope;             /* 0 => torch */
    te_switch rope_fusion;            /* on => models make their rotary tables with te_rope_freqs, off => with
                                       * te_rope_cos_sin; 0 => off. te_backend_config_validate turns it off, unless
                                       * keep_rope_fusion is set */
    bool keep_rope_fusion;            /* true => rope_fusion is on by default with CUDA, and te_backend_config_validate
                                       * turns it off only if `rope` is "quack". false => te_backend_config_validate
                                       * always turns it off, as Automodel does. (With rope_fusion the tables stay in
                                       * f32. The libraries transformers and vLLM round theirs, so log-probabilities
                                       * differ from theirs) */
    te_experts_backend experts;       /* 0 => torch_mm with CUDA, else torch */
    te_dispatcher_backend dispatcher; /* 0 => with CUDA: deepep if have_deep_ep, else uccl_ep if have_uccl_ep, else
                                       * torch (te_backend_capabilities). Without CUDA: torch */
    int dispatcher_num_sms;           /* no effect: te_group has no such setting; 0 => 20 */
    bool no_dispatcher_share_token_dispatcher; /* no effect: te.h's dispatchers keep no state that layers could share */
    bool dispatcher_async_dispatch;   /* no effect: collectives run on the context's stream */
    te_mok_backend_config mok;        /* options of the dispatcher mok */
    te_switch enable_deepep;          /* no longer an option in Automodel: te_backend_config_validate resets it to 0,
                                       * with a warning */
    bool fake_balanced_gate;          /* tokens go to the experts in turn, and the router's weights are ignored */
    double fake_gate_noise;           /* read with fake_balanced_gate: fraction of randomness in the choice of experts;
                                       * the range is not checked */
    bool no_hf_state_dict_adapter; /* true => tensors in files have the model's own names; false => the names of Hugging
                                    * Face transformers */
    bool enable_fsdp_optimizations;   /* true => ranks exchange gradients of shards after the last microbatch; false =>
                                       * after each one */
    bool has_te_fp8;                  /* true => te_fp8 is used; false => no FP8 */
    te_fp8_config te_fp8;             /* FP8 of the whole model */
    te_dtype gate_precision;          /* format of the router's GEMM and scores; 0 => the input's format.
                                       * te_backend_config_parse refuses "float64": te.h has no f64 */
    bool compile_attn;                /* has no effect: te.h fuses operations with or without it */
    te_cuda_graph_config cuda_graph;  /* the parts that run as CUDA graphs */
} te_backend_config;

/* Returns a config with every field at its default for a machine of the given capabilities. NULL means none of them. */
TE_API te_backend_config te_backend_config_defaults(const te_backend_capabilities *capabilities);
/* Replaces each zero by its default for the context's capabilities. Then applies Automodel's rules, in this order:
 *
 *      1  rope=quack turns rope_fusion off, with a warning
 *      2  without keep_rope_fusion, rope_fusion is turned off, with a warning if it was on
 *      3  te_fp8 is checked
 *      4  cuda_graph is checked: attn and te_dpa exclude each other, moe_preprocess needs moe_router
 *      5  mok is checked
 *      6  gate_precision is checked
 *      7  enable_deepep is reset to 0, with a warning
 *      8  experts=te and experts=gmm need dispatcher=deepep, hybridep, uccl_ep or mok. With another dispatcher the
 *         rule sets dispatcher=torch and experts=torch_mm, with a message of TE_LOG_INFO
 *      9  cuda_graph is checked again:
 *           cuda_graph=attn or te_dpa     needs the field attn=te, and no fp8_dpa in te_fp8.object
 *           cuda_graph=attn               also needs linear=torch, rms_norm=torch and rope_fusion off
 *           cuda_graph=moe_router         needs fake_balanced_gate off
 *           cuda_graph=moe_preprocess     needs dispatcher=hybridep
 *     10  te_fp8 needs linear=te or experts=te (after rule 8)
 *
 * With a `group`, its rank 0 alone logs the messages of rules 7 and 8. With NULL every rank does.
 * Backends that te.h does not have are accepted here: the create functions of modules refuse them.
 * A value outside its enum gives TE_ERR_INVALID before all rules (Automodel fails where the value is used). On an error
 * *config does not change. */
TE_API te_result te_backend_config_validate(te_ctx *te, te_backend_config *config, const te_group *group);

/* Sets the fields that `text` names:
 * "attn=te,linear=torch,rope_fusion=true,te_fp8=block,cuda_graph=attn+moe_router,mok.minibatch_size=512".
 * Names and values are Automodel's: "dispatcher_share_token_dispatcher=false" sets
 * no_dispatcher_share_token_dispatcher. Spaces around names and values are ignored. "cuda_graph=" selects no module.
 * The rules of te_backend_config_validate are not applied.
 * TE_ERR_INVALID for an unknown name, a name given twice, a missing value and an impossible value. The message has the
 * field, the value, the possible values and the nearest of them. On an error *config does not change. */
TE_API te_result te_backend_config_parse(te_ctx *te, const char *text, te_backend_config *config);
/* Returns the name (static string) of one of the fields that te_backend_config_parse reads. `index` is the number of
 * the field, from 0. Returns NULL if no field has this number.
 * Writes the field's possible values into `values` (truncated to fit; may be NULL), such as "te, sdpa, flex", "a whole
 * number" or "a number". */
TE_API const char *te_backend_config_field(int index, char *values, size_t size);
/* Writes the fields that are not zero into buffer (truncated to fit), in the form of te_backend_config_parse. Returns
 * the length of the whole text.
 * A te_fp8 with TE_FP8_OBJECT becomes "object", which te_backend_config_parse refuses. */
TE_API size_t te_backend_config_print(const te_backend_config *config, char *buffer, size_t size);
/* Turns the name of a backend into its enumerator, in *value. `field` is "attn", "linear", "rms_norm", "rope",
 * "experts" or "dispatcher". Errors as te_backend_config_parse. */
TE_API te_result te_backend_parse(te_ctx *te, const char *field, const char *name, int *value);
/* Returns the name of `value` (static string). `field` is as in te_backend_parse. Returns "default" for 0, unless 0 has
 * a name of its own in the field's enum. Returns "?" for another value or field. */
TE_API const char *te_backend_name(const char *field, int value);

/* ---- modules by backend ---- */

/* Options of te_initialize_linear_module. */
typedef struct te_linear_module_desc {
    te_linear_backend linear_impl;     /* 0 => te with CUDA, else torch */
    int64_t in_features, out_features; /* last sizes of x and y; at least 1 */
    bool bias;                         /* true => the module has a bias; false => none, as in Automodel. Linear of
                                        * TransformerEngine and of torch has one by default */
    te_params_device device;           /* device of the parameters; 0 => the context's */
    te_dtype dtype;                    /* format of the parameters: f32, f16 or bf16; 0 => bf16 */
    te_init init;                      /* initial values of the weight; the bias then starts at 0. If all fields of
                                        * `init` are 0, weight and bias start at the defaults of the module's class */
    const char *name;                  /* copied; NULL => "linear" */
} te_linear_module_desc;
/* Makes a module y = x W^T + b. Parameters: weight [out, in], bias [out]. desc->linear_impl selects it:
 *   te     a Linear
 *   torch  the product is in high precision under any recipe. The weight is never stored quantized. Weight and bias
 *          start uniform on [-1 / sqrt(in), 1 / sqrt(in)], as in torch.nn.Linear
 * TE_ERR_UNSUPPORTED for linear_impl "quack", TE_ERR_INVALID for a linear_impl outside its enum.
 * Source: initialize_linear_module. */
TE_API te_module *te_initialize_linear_module(te_ctx *te, const te_linear_module_desc *desc);

/* Options of te_initialize_rms_norm_module and te_float32_rms_norm_create. */
typedef struct te_rms_norm_module_desc {
    te_rms_norm_backend rms_norm_impl; /* 0 => torch_fp32. te_float32_rms_norm_create does not read this field */
    int64_t dim;                       /* last size of x; at least 1 */
    float eps;                         /* added to the mean square; 0 => 1e-5 */
    te_params_device device;           /* device of the weight; 0 => the context's */
    te_dtype dtype;                    /* format of the weight: f32, f16 or bf16; 0 => bf16 */
    const char *name;                  /* copied; NULL => "rmsnorm" */
} te_rms_norm_module_desc;
/* Makes a module that computes x / sqrt(mean of squares + eps) * weight. Parameter: weight [dim], ones at first.
 * desc->rms_norm_impl selects it:
 *   te          an RMSNorm; inside a Sequential, a Linear that follows reads its quantized output
 *   torch_fp32  a Float32RMSNorm: the results of "te", but autocast does not quantize the output
 *   torch       the normalised row is rounded to x's format before it is multiplied by the weight (torch.nn.RMSNorm,
 *               transformers' LlamaRMSNorm). Autocast does not quantize the output. The gradient is that of the
 *               unrounded formula, in f32
 * TE_ERR_UNSUPPORTED for rms_norm_impl "quack", TE_ERR_INVALID for an rms_norm_impl outside its enum.
 * Source: initialize_rms_norm_module. */
TE_API te_module *te_initialize_rms_norm_module(te_ctx *te, const te_rms_norm_module_desc *desc);
/* Makes a Float32RMSNorm, the module of te_float32_rms_norm, with a weight of any float format. */
TE_API te_module *te_float32_rms_norm_create(te_ctx *te, const te_rms_norm_module_desc *desc);
/* Returns weight * x / sqrt(mean(x^2) + eps) over the last dimension of x [.., N]; weight [N], in any float format; eps
 * 0 => 1e-5. With s = 1 / sqrt(mean(x^2) + eps), n = x s and g = dy weight, the gradients are
 *
 *     dx      = s (g - n mean(g n))
 *     dweight = the sum of dy n over all rows
 *
 * Result and gradients are computed in f32 and rounded once, the result to x's format. Differentiable; allocates. The
 * same function as te_rmsnorm.
 * Source: _float32_rms_norm_fwd. */
TE_API te_tensor *te_float32_rms_norm(te_tensor *x, te_tensor *weight, float eps);

/* ---- shapes without memory ---- */

/* Returns whether x is NULL or a tensor without memory, made by te_tensor_describe. For such an input, Linear,
 * LayerNorm, RMSNorm and the modules by backend (section above) return an output without memory. This gives the shapes
 * of a model without a launch. The output has the input's format. A wrong number of columns gives TE_ERR_SHAPE. Other
 * modules give TE_ERR_STATE.
 * A tensor with a dimension of 0 counts as allocated, and modules run it as usual.
 * Source: is_tensor_unallocated, and the lazy patcher of TransformerEngine's classes. */
TE_API bool te_is_tensor_unallocated(const te_tensor *x);
/* If `on` is true, tensors without elements count as unallocated too, as in Automodel. Linear and RMSNorm then return a
 * new empty tensor without a gradient. Off by default. */
TE_API void te_set_empty_is_unallocated(te_ctx *te, bool on);

/* ---- rotary embeddings ---- */

/* The rotary embedding that a model's config.json describes. A number that the file does not give is 0, unless a field
 * below says otherwise. */
typedef struct te_rope_config {
    double rope_theta;            /* the base */
    double partial_rotary_factor; /* fraction of a head's channels that are rotated; 1 if the file does not give it */
    const char *rope_parameters;  /* the JSON object that the fields were read from, in the caller's text (borrowed);
                                   * NULL => there was none */
    size_t rope_parameters_size;  /* bytes of rope_parameters */
    char rope_type[32];           /* "yarn" and so on; "" if the file does not give it */
    /* parameters of the rope types, under their names in config.json */
    double factor, beta_fast, beta_slow, mscale, mscale_all_dim, attention_factor, low_freq_factor, high_freq_factor;
    bool no_truncate;             /* true => the file has "truncate": false */
    int64_t original_max_position_embeddings, max_position_embeddings; /* from the top level of the config. If
                                                                        * original_max_position_embeddings is missing
                                                                        * there, it comes from rope_parameters */
    int num_short_factors, num_long_factors;                                   /* lengths of short_factor and
                                                                                * long_factor */
    /* for longrope: one factor for the frequency of each pair of channels, for short and for long sequences */
    float short_factor[TE_MAX_ROPE_FACTORS], long_factor[TE_MAX_ROPE_FACTORS];
} te_rope_config;
/* Reads "rope_parameters" of `config`, the text of a config.json, into *rope. Older keys, such as "rope_scaling", are
 * not read.
 * TE_ERR_FORMAT if "rope_parameters" is missing or null, or has no rope_theta.
 * TE_ERR_FORMAT if a field that should be a number is something else.
 * Source: get_rope_config. */
TE_API te_result te_rope_config_read(te_ctx *te, const char *config, te_rope_config *rope);
/* Reads a config.json as models of the Llama family do: "rope_parameters", else "rope_scaling", else neither.
 * rope_theta comes from that object, else from the top level, else it is 10000. Errors as te_rope_config_read. */
TE_API te_result te_rope_config_read_llama(te_ctx *te, const char *config, te_rope_config *rope);
/* Fills *rotary for the rotation of Automodel's models with experts; rope_type is ignored. The rotation has dim =
 * floor(head_dim * partial_rotary_factor) channels.
 * With `factor` above 1, frequencies are YaRN's, and attention_factor is 0.1 * ln(factor) + 1. Defaults: beta_fast 32,
 * beta_slow 1, original_max_position_embeddings 4096. YaRN computes two bounds, low and high. They are not
 * rounded (as with te_rope_scaling.no_truncate). The frequencies then are:
 *   i < low    frequency i stays unchanged
 *   i > high   frequency i is divided by `factor`
 *   between    interpolated
 * TE_ERR_INVALID unless dim is even and, with YaRN, 0 < low < high < dim / 2 - 1.
 * Source: gpt_oss RotaryEmbedding. */
TE_API te_result te_rope_config_moe_rotary(te_ctx *te, const te_rope_config *rope, int head_dim,
                                           te_rotary_desc *rotary);
/* Fills *rotary as Hugging Face transformers does, for the rope_type "default", "linear", "dynamic", "llama3", "yarn"
 * or "longrope". For "longrope", *rotary points into *rope, which must live as long as *rotary is used.
 * TE_ERR_INVALID for another rope_type; the message has the nearest name.
 * TE_ERR_FORMAT if a number that the rope_type needs is missing or out of range. */
TE_API te_result te_rope_config_llama_rotary(te_ctx *te, const te_rope_config *rope, int head_dim,
                                             te_rotary_desc *rotary);

/* Makes a table of cosines and sines, f32 [n, dim], for models that do not use te_apply_rotary_pos_emb. Row i has the
 * cosines of all channel pairs at positions[i], then the sines, both multiplied by the attention factor. `positions` is
 * borrowed for the call; NULL => 0 .. n - 1.
 *
 * te_rope_cos_sin and te_rope_freqs read base, rotary_percent, scaling and max_seqlen (0 => the largest position + 1)
 * of *rotary. `rotary` NULL => the defaults. dim is floor(head_dim * rotary_percent), even; it may be 0. Both functions
 * compute on the host and allocate. TE_ERR_INVALID for impossible sizes and negative positions. */
TE_API te_tensor *te_rope_cos_sin(te_ctx *te, const te_rotary_desc *rotary, int head_dim, const int64_t *positions,
                                  int64_t n);
/* Makes a table of angles for a fused rotation (te_rotary_desc.freqs; rotary_pos_emb of TransformerEngine): f32 [n, 1,
 * 1, dim], for positions 0 .. n - 1. The two channels of a pair, chosen by rotary->interleaved, have the same angle.
 * Writes *attention_factor (may be NULL), by which the caller multiplies queries and keys after the rotation. Fields,
 * sizes and errors as te_rope_cos_sin. */
TE_API te_tensor *te_rope_freqs(te_ctx *te, const te_rotary_desc *rotary, int head_dim, int64_t n,
                                float *attention_factor);
