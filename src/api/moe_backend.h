/* api/moe_backend.h: creates an MoE whose gate, experts and dispatcher are chosen by a te_moe_backend, as in NeMo
 * Automodel. */

/* Returns a te_moe_backend with the values of *config (NULL => zeros). Fields that te_backend_config lacks are zero;
 * the caller sets ep_group, cp_group and world_size. */
TE_API te_moe_backend te_moe_backend_of(const te_backend_config *config);

/* Creates an MoE, owned by the caller: y = experts(x) [+ shared experts(x) [* sigmoid(x w)]]. Children: gate, experts,
 * shared_experts (with children gate_proj, up_proj, down_proj), shared_expert_gate, fc1_latent_proj and
 * fc2_latent_proj. The class of the child `experts` depends on the backend:
 *
 *     dispatcher                  world_size       experts                            class
 *     mok                         multiple of 4    any                                TE_ERR_UNSUPPORTED
 *     mok                         other numbers    any                                TE_ERR_INVALID
 *     deepep, hybridep, uccl_ep   1                any                                GroupedExperts, with a warning
 *     deepep, hybridep, uccl_ep   above 1          te                                 GroupedExpertsTE
 *     deepep, hybridep, uccl_ep   above 1          torch, with te_experts_for_torch   GroupedExpertsTE
 *     deepep, hybridep, uccl_ep   above 1          others                             GroupedExpertsDeepEP
 *     torch                       any              any                                GroupedExperts
 *
 * NULL with TE_ERR_INVALID if backend is NULL. A zeroed te_moe_backend has the defaults. Source:
 * nemo_automodel.components.moe.layers.MoE. */
TE_API te_module *te_moe_create(te_ctx *te, const te_moe_config *config, const te_moe_backend *backend);
