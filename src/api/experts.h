/* api/experts.h: mixtures of experts (MoE) as in NeMo Automodel (nemo_automodel.components.moe): gates, expert modules,
 * dispatchers that bring tokens to the ranks of their experts, and files with Hugging Face names. T is the number of
 * tokens, E the number of experts, and K the number of experts that each token uses. Inputs and outputs:
 *
 *     args.input            x: [.., dim] for Gate, FakeBalancedGate and MoE, [T, dim] for expert modules
 *     args.attention.attention_mask   u8, one number per token; 1 => the token is padding and goes to no expert
 *                                     (Automodel: padding_mask, the opposite of token_mask); NULL => no padding
 *     args.topk_weights, args.topk_indices   read by expert modules: the two outputs of a gate, each [T, K]; the
 *                                     indices are i32. In a CausalLM (te_causal_lm_create), gate and experts use maps
 *                                     over all experts instead: weights f32 [T, E], and u8 [T, E] with 1 for a chosen
 *                                     expert; then no token may be padding
 *     outputs.out           y of x's shape; for a gate, the weights [T, K]
 *     outputs.topk_indices  for a gate, i32 [T, K]
 *     outputs.aux_loss      f32 [1], for a gate or an MoE in training with aux_loss_coeff: the auxiliary loss L of
 *                           te_gate_create, without the coefficient. The caller must not add it to the loss: the
 *                           backward pass includes its gradient
 *
 * Expert parallelism. Each rank of ep_group has E / size experts, in the order of the ranks. A rank may have no tokens.
 * An expert without tokens gets gradients of 0. All ranks must make all calls of a group in the same order, backward
 * passes included, whatever their numbers of tokens. Dispatchers:
 *     torch                     tokens of all ranks are gathered, each rank computes its experts, and the results are
 *                               summed in f32
 *     deepep, uccl_ep, hybridep
 *                               one implementation under three names. te_all_to_all sends tokens to the ranks of their
 *                               experts and back; the group must support it
 * In each call the host waits for the numbers of tokens. With te_set_max_dispatch_tokens it does not.
 *
 * Automodel has defects in four places. There te.h does this instead:
 *   - With an all-to-all dispatcher, experts of the backend "torch" run one GEMM per expert.
 *     te_moe_backend.te_experts_for_torch selects GroupedLinears instead, as Automodel does
 *   - Dispatchers share no state, so layers may have different numbers of experts
 *   - With every score function that has groups, all experts of a token come from the chosen groups.
 *     te_moe_config.rules_of_automodel restores Automodel's rule
 *   - A gate counts its tokens once, even if it runs again in the backward pass (checkpointing) */

/* Selects how logits become scores, how groups of experts are ranked, and whether experts are chosen by biased scores.
 * A biased score is a score plus e_score_correction_bias. */
typedef enum te_gate_score {
    TE_GATE_SOFTMAX = 0,           /* softmax over the chosen experts, or over all with softmax_before_topk; no bias, no
                                    * groups */
    TE_GATE_SIGMOID = 1,           /* sigmoid; groups are ranked by their best score or, if there is a bias, by the sum
                                    * of their two best scores */
    TE_GATE_SIGMOID_WITH_BIAS = 2, /* sigmoid; groups are ranked by the sum of their two best scores */
    TE_GATE_SOFTMAX_WITH_BIAS = 3, /* softmax over all experts; groups are ranked by the sum of their two best scores */
    TE_GATE_SQRTSOFTPLUS = 4       /* sqrt(log(1 + exp(x))); uses e_score_correction_bias, but no groups */
} te_gate_score;
/* The activation between an expert's two linear layers. g and u are the two halves of the first layer's output. */
typedef enum te_expert_activation {
    TE_EXPERT_SWIGLU = 0,      /* silu(g) u; with swiglu_limit L: silu(min(g, L)) clamp(u, -L, L) */
    TE_EXPERT_SWIGLUOAI = 1,   /* c sigmoid(alpha c) (clamp(u, -limit, limit) + 1), c = min(g, limit) */
    TE_EXPERT_QUICK_GEGLU = 2, /* as TE_EXPERT_SWIGLUOAI, with g in the even columns and u in the odd columns */
    TE_EXPERT_GEGLU = 3,       /* gelu(g) u, the tanh approximation */
    TE_EXPERT_RELU2 = 4,       /* max(x, 0)^2, not gated */
    TE_EXPERT_ACTIVATION_COUNT = 5
} te_expert_activation;

/* The configuration of a mixture of experts. Source: nemo_automodel.components.moe.config.MoEConfig. */
typedef struct te_moe_config {
    int n_routed_experts;      /* E; at least 1 */
    int n_shared_experts;      /* experts that every token uses, computed as one MLP; 0 => none */
    int n_activated_experts;   /* K; 1 to E */
    int n_expert_groups;       /* number of groups of experts, of equal size; 0 => 1 */
    int n_limited_groups;      /* number of groups from which a token's experts come; 0 => 1 */
    bool no_train_gate;        /* the gate's weight and bias are frozen (Automodel: train_gate = False) */
    float gate_bias_update_factor; /* step size of te_gate_update_bias; 0 => no e_score_correction_bias, unless
                                    * force_e_score_correction_bias is set */
    float aux_loss_coeff;      /* coefficient of the auxiliary loss; 0 => no auxiliary loss */
    te_gate_score score_func;  /* 0 => softmax */
    float route_scale;         /* factor of the router weights; 0 => 1 */
    int64_t dim, inter_dim, moe_inter_dim; /* dim: size of a token. inter_dim: inner size of the model's dense MLPs, not
                                            * read here. moe_inter_dim: inner size of an expert */
    bool norm_topk_prob;       /* true => with K > 1 the router weights are divided by their sum + 1e-20 */
    bool router_bias, expert_bias; /* router_bias: the gate has a bias. expert_bias: all experts and latent projections
                                    * have biases */
    te_expert_activation expert_activation; /* 0 => swiglu */
    bool apply_router_weight_after_down; /* true => router weights multiply the second linear layer's f32 output, bias
                                          * included; false => the activation's output */
    float activation_alpha, activation_limit; /* alpha and limit of swigluoai and quick_geglu; 0 => 1.702 and 7; a limit
                                               * of INFINITY clamps nothing */
    float swiglu_limit;        /* clamp limit of swiglu; 0 => none */
    bool softmax_before_topk;  /* TE_GATE_SOFTMAX: softmax over all experts before the choice */
    bool router_weights_fp32;  /* router weights are f32, whatever the format of the tokens */
    bool router_weight_uses_score_correction_bias; /* TE_GATE_SIGMOID: router weights are computed from biased scores */
    te_dtype dtype;            /* format of the parameters; 0 => bf16 */
    bool shared_expert_gate;   /* the shared experts' output is multiplied by sigmoid(x w) */
    te_expert_activation shared_expert_activation; /* swiglu or relu2; 0 => swiglu */
    int64_t shared_expert_inter_dim; /* size inside one shared expert; 0 => moe_inter_dim */
    bool force_e_score_correction_bias; /* true => e_score_correction_bias exists even if gate_bias_update_factor is
                                         * 0 */
    int64_t moe_latent_size;   /* routed experts, but not the gate, read the tokens projected to this size; 0 => no
                                * projection */
    bool enable_routing_replay; /* not implemented: TE_ERR_UNSUPPORTED */
    bool rules_of_automodel;   /* for checkpoints trained in Automodel: with TE_GATE_SIGMOID and
                                * TE_GATE_SOFTMAX_WITH_BIAS, biased scores of groups that are not chosen become 0. An
                                * expert with this 0 is chosen before an expert with a negative biased score. K may
                                * exceed the number of experts in the chosen groups */
    te_params_device device;   /* where parameters are allocated; 0 => the context's device */
    float init_std;            /* weights start as N(0, init_std^2), except in GroupedLinears; 0 => 0.02. Biases start
                                * at 0 */
    const char *name;          /* copied; NULL => "moe", "gate", "experts" */
} te_moe_config;

/* The backends of experts and dispatcher, as in te_backend_config, and the groups of ranks that share the work. */
typedef struct te_moe_backend {
    te_experts_backend experts;       /* 0 => torch_mm on CUDA, else torch */
    te_dispatcher_backend dispatcher; /* 0 => deepep on CUDA, else torch */
    te_linear_backend linear;         /* for shared experts, shared_expert_gate and latent projections; 0 => te on CUDA,
                                       * else torch */
    bool fake_balanced_gate;          /* the gate is a FakeBalancedGate instead of a Gate */
    float fake_gate_noise;            /* the noise of FakeBalancedGate */
    te_dtype gate_precision;          /* format of the gate's GEMM: f32, f16 or bf16; 0 => the format of the tokens */
    int dispatcher_num_sms;           /* no effect: te_group has no such setting */
    te_switch dispatcher_share_token_dispatcher; /* no effect: dispatchers keep no state that layers could share */
    bool dispatcher_async_dispatch;   /* no effect: collectives run on the context's stream */
    bool te_experts_for_torch;        /* true => TE_EXPERTS_TORCH creates GroupedExpertsTE for several ranks with an
                                       * all-to-all dispatcher, as in Automodel */
    te_group *ep_group;               /* the ranks that share the experts (borrowed for the module's lifetime); NULL =>
                                       * this rank has all experts */
    te_group *cp_group;               /* the ranks that share each sequence, for the auxiliary loss (borrowed); NULL =>
                                       * none */
    int world_size;                   /* number of all ranks of the program; 0 => the size of ep_group */
} te_moe_backend;

/* Sets the largest number of tokens that any rank of ep_group has in a call, for all experts in m and below it. All
 * ranks set the same number. The host then waits for nothing in a forward or backward pass of experts that ranks share,
 * and te_graph_begin can capture them: numbers of tokens of each expert stay on the device, and may differ in each
 * launch. All dispatchers gather the tokens then, each rank's padded to this number: (size - 1) * tokens rows from each
 * rank, there and back, where te_all_to_all sends K * tokens * (size - 1) / size rows if the experts have equal shares.
 * The experts of a rank have room for size * tokens * K rows. Experts of the backend "torch" run as "torch_mm".
 * 0, the initial value => the host waits. A capture then takes the largest number of tokens of the module's last call,
 * if the dispatcher is "torch".
 * TE_ERR_INVALID for a negative number. A call with more tokens: TE_ERR_SHAPE. The next call that is not in a capture
 * compares the numbers of all ranks, for which the host waits: TE_ERR_STATE, with two of them, if they differ. */
TE_API te_result te_set_max_dispatch_tokens(te_module *m, int64_t tokens);

/* Creates a Gate, which chooses experts and computes router weights for each token. Owned by the caller.
 * Parameters: weight [E, dim], bias [E]. Buffer: e_score_correction_bias f32 [E], which affects the choice of experts,
 * but not their weights.
 * Logits are x W^T + bias in gate_precision. Scores are in f32. Router weights are in x's format, or f32 with
 * router_weights_fp32.
 *
 * In training with aux_loss_coeff, the auxiliary loss is L = sum over experts e of f_e P_e, with
 *
 *     f_e = load_e E / (K max(N, 1))
 *     P_e = (sum over the N tokens of their score for e) / max(N, 1)
 *
 * load_e is the number of tokens of expert e. N is the number of tokens that are not padding. load_e, N and the sum of
 * the scores are over the tokens of all ranks of cp_group (borrowed; may be NULL). The backward pass of the router
 * weights adds the gradient of L (te_set_moe_aux_loss_scale).
 * TE_ERR_INVALID for gate_bias_update_factor with no_train_gate.
 * Source: nemo_automodel.components.moe.layers.Gate. */
TE_API te_module *te_gate_create(te_ctx *te, const te_moe_config *config, te_dtype gate_precision, te_group *cp_group);
/* Returns how many tokens each expert has had since the last te_gate_update_bias: f32 [E], borrowed from the module.
 * Tokens count only in training with gate_bias_update_factor. NULL if nothing has been counted, or if m is no Gate. */
TE_API te_tensor *te_gate_expert_load(te_module *m);
/* Adds gate_bias_update_factor * sign(mean(load) - load) to e_score_correction_bias, then sets the load to 0. load is
 * te_gate_expert_load, summed over the ranks of `group` (NULL => this rank alone). All ranks call it.
 * The update is in f32 even if e_score_correction_bias was cast. Syncs. Does nothing for a FakeBalancedGate.
 * TE_ERR_INVALID if gate_bias_update_factor is 0; TE_ERR_STATE in evaluation, or if nothing has been counted. */
TE_API te_result te_gate_update_bias(te_module *m, te_group *group);
/* Sets the factor of auxiliary losses' gradients in later backward passes of this context; 0 => 1. Automodel's trainers
 * set it to the size of the context-parallel group divided by the number of microbatches.
 * Source: MoEAuxLossAutoScaler.main_loss_backward_scale. */
TE_API te_result te_set_moe_aux_loss_scale(te_ctx *te, float scale);

/* Creates a FakeBalancedGate, which chooses K of E experts for each token evenly, for benchmarks. Owned by the caller.
 * The module has no parameters and does not read attention_mask. Weights are in the input's format.
 *
 * Let s be skip_first_n_experts, 0 to E - 1. Without noise, choice j of token t is the expert with index s + (t K + j)
 * mod (E - s). Its weight is 1 / K.
 * With noise n > 0, each token takes the K experts with the largest u + 0.1 n z. u is uniform, drawn for each token and
 * expert. z is N(0, 1), drawn for each expert. The weights are (1 - n) / K + n v / sum(v). v is uniform, drawn for each
 * of the token's K experts. The seed comes from the first four elements of the input, for which the host waits: equal
 * inputs give equal choices.
 * Source: nemo_automodel.components.moe.layers.FakeBalancedGate. */
TE_API te_module *te_fake_balanced_gate_create(te_ctx *te, const te_moe_config *config, int skip_first_n_experts,
                                               float noise);

/* Creates experts, owned by the caller. The output of a token x is the sum of p act(x Wg_e + bg_e) Wd_e + p bd_e over
 * its experts e, with router weights p. Sums over a token's experts are in f32. Indices outside 0 .. n_routed_experts -
 * 1 are skipped.
 * Parameters, with E experts of this rank and inter = moe_inter_dim:
 *   gate_and_up_projs    [E, dim, 2 inter] ([E, dim, inter] if not gated)
 *   down_projs           [E, inter, dim]
 *   gate_up_proj_bias    [E, 2 inter] ([E, inter] if not gated)
 *   down_proj_bias       [E, dim]
 * With moe_latent_size, dim is that size. Parameters whose format is not x's are cast in each call. Gradients have the
 * formats of the input and of the parameters.
 *
 *   te_grouped_experts_create         for the dispatcher "torch". If backend->experts is "torch_mm" or
 *                                     "torch_mm_mxfp8", the module runs grouped GEMMs with group sizes on the device.
 *                                     Else it runs one GEMM for each expert, and the host waits for the group sizes
 *   te_grouped_experts_deepep_create  for an all-to-all dispatcher. If backend->experts is "gmm", "torch_mm" or
 *                                     "torch_mm_mxfp8", the module runs grouped GEMMs, else one GEMM for each expert
 *   te_grouped_experts_te_create      for an all-to-all dispatcher. The module has two GroupedLinears, gate_up_linear
 *                                     and down_linear, which follow the recipe in force. Under a recipe each expert's
 *                                     tokens and weights are padded to the recipe's blocks. TE_ERR_INVALID with
 *                                     apply_router_weight_after_down
 *
 * "torch_mm_mxfp8" rounds the operands of the forward and input-gradient GEMMs to MXFP8, with blocks along the summed
 * dimension. Weight-gradient GEMMs stay in high precision. If dim or inter is not a multiple of 32, all GEMMs stay in
 * high precision, with one warning.
 * TE_ERR_INVALID if the number of ranks does not divide n_routed_experts, or if backend is NULL. Forward calls give
 * TE_ERR_INVALID for an input that is a shard.
 * Source: nemo_automodel.components.moe.experts, the classes of these names. */
TE_API te_module *te_grouped_experts_create(te_ctx *te, const te_moe_config *config, const te_moe_backend *backend);
TE_API te_module *te_grouped_experts_deepep_create(te_ctx *te, const te_moe_config *config,
                                                   const te_moe_backend *backend);
TE_API te_module *te_grouped_experts_te_create(te_ctx *te, const te_moe_config *config, const te_moe_backend *backend);

/* The tensors in which the parameters of this rank's experts are stacked. */
typedef enum te_experts_tensor {
    TE_EXPERTS_GATE_AND_UP_PROJS = 0, /* [E, dim, 2 inter], or [E, dim, inter] if not gated */
    TE_EXPERTS_DOWN_PROJS = 1,        /* [E, inter, dim] */
    TE_EXPERTS_GATE_UP_PROJ_BIAS = 2, /* [E, 2 inter], or [E, inter] if not gated */
    TE_EXPERTS_DOWN_PROJ_BIAS = 3     /* [E, dim] */
} te_experts_tensor;
/* Returns the tensor's name, for instance "gate_and_up_projs"; "?" for a value outside the enum. Static string. */
TE_API const char *te_experts_tensor_name(te_experts_tensor which);
/* Returns one stacked tensor of m, an expert module or an MoE, in the layout of GroupedExperts. It is the parameter
 * itself (borrowed). For GroupedExpertsTE it is a copy in the innermost scope, without a gradient. NULL without an
 * error if there is no such bias; NULL with TE_ERR_INVALID if m has no experts. */
TE_API te_tensor *te_experts_get(te_module *m, te_experts_tensor which);
/* Copies `value`, in the layout of te_experts_get and any float format, into the parameters. NULL changes nothing. */
TE_API te_result te_experts_set(te_module *m, te_experts_tensor which, te_tensor *value);


/* Computes which experts rank `rank` of `size` has: *count experts, beginning with expert *first. If `size` does not
 * divide n_experts, each rank below n_experts % size has one expert more than the other ranks. TE_ERR_INVALID for
 * arguments out of range. */
TE_API te_result te_expert_range(te_ctx *te, int n_experts, int rank, int size, int *first, int *count);
/* Reads this rank's experts from files with Hugging Face names into m, a module of te_grouped_experts_..._create or an
 * MoE. Expert number E has three tensors [out, in]:
 *
 *     PREFIX + "experts.E.gate_proj.weight", "experts.E.up_proj.weight", "experts.E.down_proj.weight"
 *
 * With expert_bias there are also names with ".bias" in place of ".weight". prefix NULL => "". Formats are converted.
 * Other tensors, such as "weight_scale_inv", are ignored. All tensors are checked before anything is written.
 * TE_ERR_FORMAT if a tensor is in none of the files; the message names up to five such tensors.
 * TE_ERR_SHAPE for a tensor of another shape.
 * TE_ERR_DTYPE for tensors of FP8 or FP4 codes.
 * TE_ERR_UNSUPPORTED for parameters that are stored quantized. */
TE_API te_result te_experts_load_hf(te_module *m, te_safetensors *const *files, int num_files, const char *prefix);
/* Writes this rank's experts to a file, as te_safetensors_write does. Names are those of te_experts_load_hf, formats
 * those of the parameters. Syncs. TE_ERR_UNSUPPORTED for weights that are stored quantized. */
TE_API te_result te_experts_save_hf(te_module *m, const char *path, const char *prefix);
