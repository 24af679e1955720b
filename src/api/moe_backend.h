/* api/moe_backend.h: a mixture of experts as NeMo Automodel chooses its parts. */

/* The fields that a config has; the groups and world_size are the caller's to add. All zero for NULL. */
TE_API te_moe_backend te_moe_backend_of(const te_backend_config *config);

/* A mixture of experts: y = experts(x) [+ shared experts(x) [* sigmoid(x w)]]. Children: gate, experts, shared_experts
 * (children gate_proj, up_proj, down_proj), shared_expert_gate, fc1_latent_proj and fc2_latent_proj. The class of its
 * experts:
 *
 *     dispatcher                  ranks      experts                     class
 *     mok                         4, 8, ..                               TE_ERR_UNSUPPORTED; TE_ERR_INVALID for other
 *                                                                        numbers
 *     deepep, hybridep, uccl_ep   1                                      GroupedExperts, with a warning
 *     deepep, hybridep, uccl_ep   2, 3, ..   gmm, torch_mm.., torch      GroupedExpertsDeepEP
 *     deepep, hybridep, uccl_ep   2, 3, ..   te                          GroupedExpertsTE
 *     torch                                                              GroupedExperts
 * TE_ERR_INVALID without a backend: a zeroed one has the defaults. Source: nemo_automodel.components.moe.layers.MoE. */
TE_API te_module *te_moe_create(te_ctx *te, const te_moe_config *config, const te_moe_backend *backend);
