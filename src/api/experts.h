/* api/experts.h: mixtures of experts as NeMo Automodel builds them (nemo_automodel.components.moe): a gate that
 * chooses, experts that compute, dispatchers that take tokens to the ranks that have their experts, and the names that
 * Hugging Face's files give the weights. On the functions of api/moe.h. T tokens, E experts, K experts of each token.
 *
 *     args.input            x, [.., dim]                        Gate, FakeBalancedGate, MoE; [T, dim] of experts
 *     args.attention.attention_mask   u8, one number a token, 1 => padding, which goes to no expert (Automodel:
 *                                     padding_mask, the opposite of token_mask); NULL => none
 *     args.topk_weights, args.topk_indices   [T, K], i32: what a gate has chosen, for experts. Gate and experts of a
 *                                     CausalLM (te_causal_lm_create) have maps in place of lists: f32 and u8 [T, E], 1
 *                                     => chosen; no token is padding there
 *     outputs.out           y like x; of a gate the weights [T, K]
 *     outputs.topk_indices  i32 [T, K], of a gate
 *     outputs.aux_loss      f32 [1], of a gate and an MoE in training with aux_loss_coeff: L below, without its
 *                           coefficient; its gradient is on the way already
 *
 * Experts in parallel. The ranks of ep_group have E / size experts each, in order of their numbers, and make all calls
 * together, each with tokens of its own, as many as it likes or none. An expert that gets no token has gradients of
 * zeros. Dispatchers:
 *     torch                     tokens of all ranks are gathered, each rank computes its experts, and the results are
 *                               summed in f32
 *     deepep, uccl_ep, hybridep tokens travel to the ranks of their experts and back (te_all_to_all, which the group
 *                               must have): one implementation has the three names. The host waits for the counts
 * A group's calls are made in one order on all ranks, backward passes included: nothing on a rank may depend on its
 * number of tokens.
 *
 * te.h differs from Automodel in four places, where Automodel has defects: experts "torch" with an all-to-all
 * dispatcher are loops and not GroupedLinears (te_experts_for_torch gives those); dispatchers share no state, so each
 * layer has its own number of experts; groups of experts that are not chosen are out of the choice for every score
 * (te_moe_config.rules_of_automodel: as there); the load of a checkpointed gate counts once. */

/* How logits become scores, and which groups and biases count. Group and bias are read by those that name them. */
typedef enum te_gate_score {
    TE_GATE_SOFTMAX = 0,           /* softmax of the chosen ones, or with softmax_before_topk of all; no bias, no
                                    * groups */
    TE_GATE_SIGMOID = 1,           /* groups by their best expert, with a bias by the sum of their two best */
    TE_GATE_SIGMOID_WITH_BIAS = 2, /* groups by the sum of their two best */
    TE_GATE_SOFTMAX_WITH_BIAS = 3, /* softmax of all; groups by the sum of their two best */
    TE_GATE_SQRTSOFTPLUS = 4       /* sqrt(log(1 + exp(x))); bias, no groups */
} te_gate_score;
/* The function between an expert's two products. g and u are the halves of the first one's output. */
typedef enum te_expert_activation {
    TE_EXPERT_SWIGLU = 0,      /* silu(g) u; with swiglu_limit L: silu(min(g, L)) clamp(u, -L, L) */
    TE_EXPERT_SWIGLUOAI = 1,   /* c sigmoid(alpha c) (clamp(u, -limit, limit) + 1), c = min(g, limit) */
    TE_EXPERT_QUICK_GEGLU = 2, /* the same, with g in the even columns and u in the odd ones */
    TE_EXPERT_GEGLU = 3,       /* gelu(g) u, the tanh approximation */
    TE_EXPERT_RELU2 = 4,       /* max(x, 0)^2, without a second half */
    TE_EXPERT_ACTIVATION_COUNT = 5
} te_expert_activation;

/* A mixture of experts. Source: nemo_automodel.components.moe.config.MoEConfig. */
typedef struct te_moe_config {
    int n_routed_experts;      /* E; at least 1 */
    int n_shared_experts;      /* experts of every token, as one MLP; 0 => none */
    int n_activated_experts;   /* K; 1 to E */
    int n_expert_groups;       /* groups of equal size; 0 => 1 */
    int n_limited_groups;      /* a token's experts come from so many of them; 0 => 1 */
    bool no_train_gate;        /* the gate's weight and bias are frozen (Automodel: train_gate = False) */
    float gate_bias_update_factor; /* what te_gate_update_bias adds or takes away; 0 => there is no bias of the choice,
                                    * unless force_e_score_correction_bias */
    float aux_loss_coeff;      /* of the auxiliary loss; 0 => none */
    te_gate_score score_func;  /* 0 => softmax */
    float route_scale;         /* factor of the weights; 0 => 1 */
    int64_t dim, inter_dim, moe_inter_dim; /* sizes: of a token; between the products of a dense layer beside this one,
                                            * which is not read here; of an expert */
    bool norm_topk_prob;       /* with K > 1 the weights are divided by their sum + 1e-20 */
    bool router_bias, expert_bias; /* the gate's product has a bias; so have experts, shared experts and latent
                                    * projections */
    te_expert_activation expert_activation; /* 0 => swiglu */
    bool apply_router_weight_after_down; /* the weight multiplies the second product's f32 result, bias included, in
                                          * place of the activation's */
    float activation_alpha, activation_limit; /* of swigluoai and quick_geglu; 0 => 1.702 and 7; a limit of INFINITY
                                               * clamps nothing */
    float swiglu_limit;        /* of swiglu; 0 => none */
    bool softmax_before_topk;  /* of TE_GATE_SOFTMAX */
    bool router_weights_fp32;  /* the weights are f32, whatever the tokens are */
    bool router_weight_uses_score_correction_bias; /* of TE_GATE_SIGMOID: the weights are of the biased scores */
    te_dtype dtype;            /* of parameters; 0 => bf16 */
    bool shared_expert_gate;   /* the shared experts' output is multiplied by sigmoid(x w) */
    te_expert_activation shared_expert_activation; /* swiglu (0 =>) or relu2 */
    int64_t shared_expert_inter_dim; /* of one shared expert; 0 => moe_inter_dim */
    bool force_e_score_correction_bias; /* the bias of the choice exists although nothing updates it */
    int64_t moe_latent_size;   /* routed experts work on projections of the tokens to this size; 0 => on the tokens. The
                                * gate reads the tokens */
    bool enable_routing_replay; /* not yet: TE_ERR_UNSUPPORTED */
    bool rules_of_automodel;   /* its choice where te.h departs from it: with TE_GATE_SIGMOID and
                                * TE_GATE_SOFTMAX_WITH_BIAS the biased scores of groups that are not chosen become 0,
                                * above negative ones, so that their experts may be chosen, and K may be above the
                                * number of experts in the chosen groups. For checkpoints trained there */
    te_params_device device;   /* of parameters; 0 => the context's */
    float init_std;            /* of weights' first values, N(0, init_std^2), but those of GroupedLinears; 0 => 0.02.
                                * Biases begin at 0 */
    const char *name;          /* copied; NULL => "moe", "gate", "experts" */
} te_moe_config;

/* The implementations of experts and of the dispatcher, as a te_backend_config names them, and the ranks. */
typedef struct te_moe_backend {
    te_experts_backend experts;       /* 0 => torch_mm on CUDA, else torch */
    te_dispatcher_backend dispatcher; /* 0 => deepep on CUDA, else torch */
    te_linear_backend linear;         /* of shared experts, their gate and latent projections; 0 => te on CUDA, else
                                       * torch */
    bool fake_balanced_gate;          /* FakeBalancedGate in place of the Gate */
    float fake_gate_noise;            /* its noise */
    te_dtype gate_precision;          /* of the gate's product: f32, f16 or bf16; 0 => the tokens' */
    int dispatcher_num_sms;           /* for groups that can be told; te_group cannot: without effect */
    te_switch dispatcher_share_token_dispatcher; /* without effect: nothing that layers could share is kept */
    bool dispatcher_async_dispatch;   /* without effect: a collective belongs to the context's stream */
    bool te_experts_for_torch;        /* experts "torch" with an all-to-all dispatcher over several ranks are
                                       * GroupedExpertsTE, as in Automodel */
    te_group *ep_group;               /* the ranks that share the experts (borrowed for the module's lifetime); NULL =>
                                       * this rank has all */
    te_group *cp_group;               /* the ranks that share each sequence, for the auxiliary loss (borrowed); NULL =>
                                       * none */
    int world_size;                   /* all ranks of the program; 0 => those of ep_group */
} te_moe_backend;

/* A gate: weights and experts of each token. Logits are x W^T + bias in gate_precision; scores are computed in f32;
 * weights are in x's format, or f32 with router_weights_fp32. The bias of the choice shifts who is chosen and not the
 * weights. Parameters: weight [E, dim], bias [E]; buffer: e_score_correction_bias f32 [E].
 * In training with aux_loss_coeff, L = sum over e of f_e P_e, with f_e = load_e E / (K max(N, 1)) and P_e the sum over
 * tokens of their score of e, divided by max(N, 1); N tokens without padding; loads, tokens and scores of all ranks of
 * cp_group (borrowed; may be NULL). Its gradient goes into the weights' (te_set_moe_aux_loss_scale).
 * TE_ERR_INVALID for gate_bias_update_factor with no_train_gate. Source: nemo_automodel.components.moe.layers.Gate. */
TE_API te_module *te_gate_create(te_ctx *te, const te_moe_config *config, te_dtype gate_precision, te_group *cp_group);
/* Tokens of each expert since the last te_gate_update_bias, f32 [E] (borrowed from the module), counted in training
 * with gate_bias_update_factor; NULL if there is none, or m is no Gate. */
TE_API te_tensor *te_gate_expert_load(te_module *m);
/* e_score_correction_bias += gate_bias_update_factor * sign(mean(load) - load), with the load of all ranks of `group`
 * (NULL => this rank's), which is 0 afterwards. TE_ERR_INVALID where nothing updates it, TE_ERR_STATE in evaluation or
 * without a load. In f32 throughout, also where the buffer was cast. Syncs. All ranks call it. */
TE_API te_result te_gate_update_bias(te_module *m, te_group *group);
/* The factor of the gradient of auxiliary losses in this context's backward passes, from here on; 0 => 1. Automodel's
 * trainers set the size of the context-parallel group divided by the number of microbatches. Source:
 * MoEAuxLossAutoScaler.main_loss_backward_scale. */
TE_API te_result te_set_moe_aux_loss_scale(te_ctx *te, float scale);

/* A gate that chooses evenly, for benchmarks. Expert j of token t is skip + (t K + j) mod (E - skip), with weight 1 /
 * K. With noise n: weights (1 - n) / K + n u / sum u, u uniform, and the K best of uniform scores + 0.1 n N(0, 1) of
 * each expert, from random numbers that x's first four elements decide (the host waits for them): equal tokens, equal
 * choice.
 * 0 <= skip_first_n_experts < E. Weights are in x's format. No parameters; padding is not looked at. Source:
 * nemo_automodel.components.moe.layers.FakeBalancedGate. */
TE_API te_module *te_fake_balanced_gate_create(te_ctx *te, const te_moe_config *config, int skip_first_n_experts,
                                               float noise);

/* Experts. y of token t = sum over its experts e, with weight p: act(x Wg_e + bg_e) p Wd_e + p bd_e. Copies are sorted
 * by expert; sums over a token's experts are in f32. Parameters of this rank's experts: gate_and_up_projs [E, dim, 2
 * inter] (not gated: [E, dim, inter]), down_projs [E, inter, dim], gate_up_proj_bias [E, 2 inter], down_proj_bias [E,
 * dim]; of another format than x they are cast in each call. With moe_latent_size dim is that. Experts outside 0 .. E-1
 * are passed over.
 * The input's gradient and the weights' have their formats. TE_ERR_INVALID for an input that is a shard.
 *
 *   te_grouped_experts_create         dispatcher torch. experts: torch_mm, torch_mm_mxfp8: grouped products, sizes on
 *                                     the device; all others: a product for each expert, for whose sizes the host waits
 *   te_grouped_experts_deepep_create  an all-to-all dispatcher. experts: gmm, torch_mm, torch_mm_mxfp8: grouped
 *                                     products; others: a product for each expert
 *   te_grouped_experts_te_create      an all-to-all dispatcher and two GroupedLinears, gate_up_linear and down_linear,
 *                                     which follow the recipe in force; under one, tokens and weights are padded to its
 *                                     blocks. TE_ERR_INVALID with apply_router_weight_after_down
 *
 * torch_mm_mxfp8 quantizes both factors of the first two of each product's three multiplications to MXFP8 along the
 * sum, weights' gradients stay in high precision; where a block of 32 would reach into the next expert's weight (dim or
 * inter no multiple of 32), the products are plain ones, and a context says so once.
 * TE_ERR_INVALID if the ranks do not divide E, and without a backend. Source: nemo_automodel.components.moe.experts,
 * the classes of these names. */
TE_API te_module *te_grouped_experts_create(te_ctx *te, const te_moe_config *config, const te_moe_backend *backend);
TE_API te_module *te_grouped_experts_deepep_create(te_ctx *te, const te_moe_config *config,
                                                   const te_moe_backend *backend);
TE_API te_module *te_grouped_experts_te_create(te_ctx *te, const te_moe_config *config, const te_moe_backend *backend);

/* The stacked tensors of this rank's experts. */
typedef enum te_experts_tensor {
    TE_EXPERTS_GATE_AND_UP_PROJS = 0, /* [E, dim, 2 inter], or not gated [E, dim, inter] */
    TE_EXPERTS_DOWN_PROJS = 1,        /* [E, inter, dim] */
    TE_EXPERTS_GATE_UP_PROJ_BIAS = 2, /* [E, 2 inter], or [E, inter] */
    TE_EXPERTS_DOWN_PROJ_BIAS = 3     /* [E, dim] */
} te_experts_tensor;
/* "gate_and_up_projs" ... Static string; "?" for a value outside. */
TE_API const char *te_experts_tensor_name(te_experts_tensor which);
/* One of them in the layout of GroupedExperts: the parameter itself (borrowed), or of GroupedExpertsTE a new tensor, a
 * copy without history. NULL without an error where there is no bias; NULL with TE_ERR_INVALID if m has no experts. */
TE_API te_tensor *te_experts_get(te_module *m, te_experts_tensor which);
/* Copies `value`, of that layout and any float format, into the parameters. A NULL value changes nothing. */
TE_API te_result te_experts_set(te_module *m, te_experts_tensor which, te_tensor *value);


/* The experts of rank `rank` of `size`: *first and *count. Where the ranks do not divide them, the first n_experts %
 * size ranks have one more. TE_ERR_INVALID outside. */
TE_API te_result te_expert_range(te_ctx *te, int n_experts, int rank, int size, int *first, int *count);
/* Reads this rank's experts from files with Hugging Face's names, PREFIX + "experts.E.gate_proj.weight", "up_proj" and
 * "down_proj" [out, in], and ".bias" with expert_bias, into m, a module of te_grouped_experts_..._create or an MoE,
 * converting formats: each goes to its place in the parameters without a copy of the stack. Other tensors of the files,
 * such as "weight_scale_inv", are passed over. TE_ERR_FORMAT with up to five names of tensors that no file has, before
 * anything is written; TE_ERR_SHAPE, TE_ERR_DTYPE for codes. prefix NULL => "". */
TE_API te_result te_experts_load_hf(te_module *m, te_safetensors *const *files, int num_files, const char *prefix);
/* Writes this rank's experts to a file with these names, in the parameters' format, as te_safetensors_write does.
 * Syncs. TE_ERR_UNSUPPORTED for weights that are stored quantized. */
TE_API te_result te_experts_save_hf(te_module *m, const char *path, const char *prefix);
