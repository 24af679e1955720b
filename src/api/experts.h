/* api/experts.h: mixtures of experts (MoE) as in NeMo Automodel (nemo_automodel.components.moe): gates that choose
 * experts, expert modules, dispatchers that bring tokens to the ranks of their experts, and weights in files with
 * Hugging Face names. Built on the functions of api/moe.h. T tokens, E experts, K experts for each token.
 *
 *     args.input            x, [.., dim]                        Gate, FakeBalancedGate, MoE; [T, dim] of experts
 *     args.attention.attention_mask   u8, one number a token, 1 => padding, which goes to no expert (Automodel:
 *                                     padding_mask, the opposite of token_mask); NULL => none
 *     args.topk_weights, args.topk_indices   [T, K], i32: the output of a gate, for experts. Gate and experts of a
 *                                     CausalLM (te_causal_lm_create) use maps instead of lists: f32 and u8 [T, E], 1 =>
 *                                     chosen; in these no token is padding
 *     outputs.out           y like x; of a gate the weights [T, K]
 *     outputs.topk_indices  i32 [T, K], of a gate
 *     outputs.aux_loss      f32 [1], of a gate and an MoE in training with aux_loss_coeff: L below, without the
 *                           coefficient; the backward pass adds its gradient by itself
 *
 * Expert parallelism. Each rank of ep_group has E / size experts, in order of the ranks. All ranks make all calls
 * together, each with its own tokens; a rank may have any number of tokens, also none. An expert without tokens has
 * gradients of zeros. Dispatchers:
 *     torch                     tokens of all ranks are gathered, each rank computes its experts, and the results are
 *                               summed in f32
 *     deepep, uccl_ep, hybridep tokens are sent to the ranks of their experts and back (te_all_to_all, which the group
 *                               must have). The three names have one implementation. The host waits for the counts
 * All ranks must make the calls of a group in the same order, backward passes included: the order must not depend on
 * a rank's number of tokens.
 *
 * te.h differs from Automodel in four places where Automodel has defects. Experts "torch" with an all-to-all
 * dispatcher loop over experts and are not GroupedLinears (te_experts_for_torch selects GroupedLinears). Dispatchers
 * share no state, so each layer may have another number of experts. Groups that are not chosen are excluded from the
 * choice for every score function (te_moe_config.rules_of_automodel restores Automodel's rule). The load of a
 * checkpointed gate is counted once. */

/* How logits become scores, and whether groups of experts and the bias of the choice (e_score_correction_bias) are
 * used. */
typedef enum te_gate_score {
    TE_GATE_SOFTMAX = 0,           /* softmax over the chosen experts, or with softmax_before_topk over all; no bias, no
                                    * groups */
    TE_GATE_SIGMOID = 1,           /* sigmoid; groups are ranked by their best expert, or if there is a bias by the sum
                                    * of their two best experts */
    TE_GATE_SIGMOID_WITH_BIAS = 2, /* sigmoid; groups are ranked by the sum of their two best experts */
    TE_GATE_SOFTMAX_WITH_BIAS = 3, /* softmax over all; groups are ranked by the sum of their two best experts */
    TE_GATE_SQRTSOFTPLUS = 4       /* sqrt(log(1 + exp(x))); bias, no groups */
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
    float gate_bias_update_factor; /* step of te_gate_update_bias; 0 => there is no bias of the choice, unless
                                    * force_e_score_correction_bias is set */
    float aux_loss_coeff;      /* coefficient of the auxiliary loss; 0 => no auxiliary loss */
    te_gate_score score_func;  /* 0 => softmax */
    float route_scale;         /* factor of the router weights; 0 => 1 */
    int64_t dim, inter_dim, moe_inter_dim; /* size of a token; size inside a dense MLP of the model, which is not read
                                            * here; size inside an expert */
    bool norm_topk_prob;       /* with K > 1 the router weights are divided by their sum + 1e-20 */
    bool router_bias, expert_bias; /* the gate has a bias; experts, shared experts and latent projections have biases */
    te_expert_activation expert_activation; /* 0 => swiglu */
    bool apply_router_weight_after_down; /* router weights multiply the f32 output of the second linear layer, bias
                                          * included; false => the output of the activation */
    float activation_alpha, activation_limit; /* of swigluoai and quick_geglu; 0 => 1.702 and 7; a limit of INFINITY
                                               * clamps nothing */
    float swiglu_limit;        /* clamp limit of swiglu; 0 => none */
    bool softmax_before_topk;  /* TE_GATE_SOFTMAX: softmax over all experts before the choice */
    bool router_weights_fp32;  /* router weights are f32, whatever the format of the tokens */
    bool router_weight_uses_score_correction_bias; /* TE_GATE_SIGMOID: router weights are computed from biased scores */
    te_dtype dtype;            /* format of the parameters; 0 => bf16 */
    bool shared_expert_gate;   /* the shared experts' output is multiplied by sigmoid(x w) */
    te_expert_activation shared_expert_activation; /* swiglu or relu2; 0 => swiglu */
    int64_t shared_expert_inter_dim; /* size inside one shared expert; 0 => moe_inter_dim */
    bool force_e_score_correction_bias; /* the bias of the choice exists even if gate_bias_update_factor is 0 */
    int64_t moe_latent_size;   /* routed experts read projections of the tokens to this size; 0 => the tokens. The gate
                                * always reads the tokens */
    bool enable_routing_replay; /* not implemented: TE_ERR_UNSUPPORTED */
    bool rules_of_automodel;   /* for checkpoints trained in Automodel: with TE_GATE_SIGMOID and
                                * TE_GATE_SOFTMAX_WITH_BIAS, biased scores of groups that are not chosen become 0. 0 is
                                * above negative scores, so experts of these groups may be chosen, and K may exceed the
                                * number of experts in the chosen groups */
    te_params_device device;   /* where parameters are allocated; 0 => the context's device */
    float init_std;            /* weights start as N(0, init_std^2), except those of GroupedLinears; 0 => 0.02. Biases
                                * start at 0 */
    const char *name;          /* copied; NULL => "moe", "gate", "experts" */
} te_moe_config;

/* The backends of experts and dispatcher, as in te_backend_config, and the groups of ranks. */
typedef struct te_moe_backend {
    te_experts_backend experts;       /* 0 => torch_mm on CUDA, else torch */
    te_dispatcher_backend dispatcher; /* 0 => deepep on CUDA, else torch */
    te_linear_backend linear;         /* for shared experts, shared_expert_gate and latent projections; 0 => te on CUDA,
                                       * else torch */
    bool fake_balanced_gate;          /* FakeBalancedGate instead of Gate */
    float fake_gate_noise;            /* the noise of FakeBalancedGate */
    te_dtype gate_precision;          /* format of the gate's GEMM: f32, f16 or bf16; 0 => the format of the tokens */
    int dispatcher_num_sms;           /* no effect: te_group has no such setting */
    te_switch dispatcher_share_token_dispatcher; /* no effect: dispatchers keep no state that layers could share */
    bool dispatcher_async_dispatch;   /* no effect: collectives run on the context's stream */
    bool te_experts_for_torch;        /* experts "torch" with an all-to-all dispatcher over several ranks are
                                       * GroupedExpertsTE, as in Automodel */
    te_group *ep_group;               /* the ranks that share the experts (borrowed for the module's lifetime); NULL =>
                                       * this rank has all experts */
    te_group *cp_group;               /* the ranks that share each sequence, for the auxiliary loss (borrowed); NULL =>
                                       * none */
    int world_size;                   /* number of all ranks of the program; 0 => the size of ep_group */
} te_moe_backend;

/* Creates a Gate, which chooses experts and computes router weights for each token. Logits are x W^T + bias in
 * gate_precision. Scores are computed in f32. Router weights are in x's format, or f32 with router_weights_fp32. The
 * bias of the choice affects which experts are chosen, but not their weights. Parameters: weight [E, dim], bias [E];
 * buffer: e_score_correction_bias f32 [E]. Owned by the caller. In training with aux_loss_coeff, L = sum over e of
 * f_e P_e, with f_e = load_e E / (K max(N, 1)) and P_e the sum over tokens of their score of e, divided by max(N,
 * 1). N is the number of tokens without padding. Loads, tokens and scores are those of all ranks of cp_group
 * (borrowed; may be NULL). The gradient of L is added to the backward pass of the router weights
 * (te_set_moe_aux_loss_scale).
 * TE_ERR_INVALID for gate_bias_update_factor with no_train_gate. Source: nemo_automodel.components.moe.layers.Gate. */
TE_API te_module *te_gate_create(te_ctx *te, const te_moe_config *config, te_dtype gate_precision, te_group *cp_group);
/* Returns the number of tokens of each expert since the last te_gate_update_bias, f32 [E] (borrowed from the
 * module). It is counted in training with gate_bias_update_factor. NULL if nothing has been counted, or if m is no
 * Gate. */
TE_API te_tensor *te_gate_expert_load(te_module *m);
/* Updates the bias of the choice: e_score_correction_bias += gate_bias_update_factor * sign(mean(load) - load), with
 * the load summed over the ranks of `group` (NULL => this rank alone); then sets the load to 0. All ranks call it.
 * The update is in f32 even if the buffer was cast. Syncs. Does nothing for a FakeBalancedGate. TE_ERR_INVALID if
 * gate_bias_update_factor is 0; TE_ERR_STATE in evaluation, or if nothing has been counted. */
TE_API te_result te_gate_update_bias(te_module *m, te_group *group);
/* Sets the factor of the gradient of auxiliary losses in later backward passes of this context; 0 => 1. Automodel's
 * trainers set the size of the context-parallel group divided by the number of microbatches. Source:
 * MoEAuxLossAutoScaler.main_loss_backward_scale. */
TE_API te_result te_set_moe_aux_loss_scale(te_ctx *te, float scale);

/* Creates a FakeBalancedGate, which chooses experts evenly, for benchmarks. Expert j of token t is skip + (t K + j)
 * mod (E - skip), with weight 1 / K. With noise n the weights are (1 - n) / K + n u / sum u with u uniform, and the
 * choice is the K best of uniform scores + 0.1 n N(0, 1) of each expert. The seed of this noise is made from x's
 * first four elements, for which the host waits: equal tokens give an equal choice. 0 <= skip_first_n_experts < E.
 * Weights are in x's format. No parameters; padding is not read. Owned by the caller.
 * Source: nemo_automodel.components.moe.layers.FakeBalancedGate. */
TE_API te_module *te_fake_balanced_gate_create(te_ctx *te, const te_moe_config *config, int skip_first_n_experts,
                                               float noise);

/* Creates experts: y of token t = sum over its experts e, with router weight p, of act(x Wg_e + bg_e) p Wd_e + p
 * bd_e. Copies of tokens are sorted by expert. Sums over a token's experts are in f32. Parameters of this rank's
 * experts: gate_and_up_projs [E, dim, 2 inter] (not gated: [E, dim, inter]), down_projs [E, inter, dim],
 * gate_up_proj_bias [E, 2 inter], down_proj_bias [E, dim]. Parameters of another format than x are cast in each
 * call. With moe_latent_size, dim is that size. Indices outside 0 .. E-1 are skipped. Gradients have the formats of
 * the input and of the parameters.
 * TE_ERR_INVALID for an input that is a shard.
 *
 *   te_grouped_experts_create         dispatcher torch. experts torch_mm and torch_mm_mxfp8: grouped GEMMs with sizes
 *                                     on the device; all others: one GEMM for each expert, and the host waits for the
 *                                     sizes
 *   te_grouped_experts_deepep_create  an all-to-all dispatcher. experts gmm, torch_mm and torch_mm_mxfp8: grouped
 *                                     GEMMs; all others: one GEMM for each expert
 *   te_grouped_experts_te_create      an all-to-all dispatcher and two GroupedLinears, gate_up_linear and down_linear,
 *                                     which follow the recipe in force. Under a recipe each expert's tokens and weights
 *                                     are padded to the recipe's blocks. TE_ERR_INVALID with
 *                                     apply_router_weight_after_down
 *
 * torch_mm_mxfp8 rounds both operands of the forward GEMM and of the input's gradient to MXFP8, with blocks along
 * the summed dimension; the weights' gradients stay in high precision. If dim or inter is no multiple of 32, a block
 * would span two experts' weights: then all GEMMs stay in high precision, with one warning in a context.
 * TE_ERR_INVALID if the number of ranks does not divide E, or if backend is NULL. Owned by the caller.
 * Source: nemo_automodel.components.moe.experts, the classes of these names. */
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
/* Returns the tensor's name, "gate_and_up_projs" for instance: a static string; "?" for a value outside the enum. */
TE_API const char *te_experts_tensor_name(te_experts_tensor which);
/* Returns a stacked tensor of the experts of m (experts, or an MoE) in the layout of GroupedExperts: the parameter
 * itself (borrowed); for GroupedExpertsTE a copy, not recorded, in the innermost scope. NULL without an error if
 * there is no such bias; NULL with TE_ERR_INVALID if m has no experts. */
TE_API te_tensor *te_experts_get(te_module *m, te_experts_tensor which);
/* Copies `value`, in the layout of te_experts_get and any float format, into the parameters. A NULL value changes
 * nothing. */
TE_API te_result te_experts_set(te_module *m, te_experts_tensor which, te_tensor *value);


/* Computes which experts rank `rank` of `size` ranks has: *count experts from *first on. If `size` does not divide
 * n_experts, the first n_experts % size ranks have one more. TE_ERR_INVALID for arguments out of range. */
TE_API te_result te_expert_range(te_ctx *te, int n_experts, int rank, int size, int *first, int *count);
/* Reads this rank's experts from files with Hugging Face names into m, a module of te_grouped_experts_..._create or an
 * MoE. The names are PREFIX + "experts.E.gate_proj.weight", "up_proj" and "down_proj" [out, in], and ".bias" with
 * expert_bias; prefix NULL => "". Formats are converted, and each tensor is copied straight to its place in the stack.
 * Other tensors of the files, such as "weight_scale_inv", are ignored. All tensors are checked before anything is
 * written: TE_ERR_FORMAT, with up to five names of tensors that no file has; TE_ERR_SHAPE; TE_ERR_DTYPE for codes;
 * TE_ERR_UNSUPPORTED for parameters that are stored quantized. */
TE_API te_result te_experts_load_hf(te_module *m, te_safetensors *const *files, int num_files, const char *prefix);
/* Writes this rank's experts to a file with the names of te_experts_load_hf, in the parameters' format, as
 * te_safetensors_write does. Syncs. TE_ERR_UNSUPPORTED for weights that are stored quantized. */
TE_API te_result te_experts_save_hf(te_module *m, const char *path, const char *prefix);
