/* api/moe.h: mixtures of experts: the functions and modules of TransformerEngine by their names, on the raw operations
 * of api/ops_moe.h, which describe the maps. T tokens, E experts. Nothing waits for the device unless it says so: the
 * sizes that a router decides may stay there, and change from launch to launch of a graph. The functions follow the
 * rules of api/functions.h.
 *
 * These arguments of TransformerEngine have none here:
 *   max_token_num     sizes a workspace; the pool's grows by itself
 *   probs of moe_unpermute   the old name of merging_probs
 *   qb_histogram, qb_bin_bounds, qb_histogram_mode   quantile balancing is not implemented yet
 *   use_grouped_tensor   m_splits or m_splits_tensor says which way a GroupedLinear goes
 *   single_grouped_weight, single_grouped_bias   parameters are made as parts of one tensor, each with its name
 * Functions that only move rows (te_moe_permute.., te_moe_sort_chunks_by_index..) take quantized inputs, and give
 * quantized results: of FP8 with one scale a tensor, of 1 x 128 blocks and of MXFP8 with plain scales the row-wise
 * codes move, each row with its scales, and the column-wise copy stays behind; gradients are plain. Other kinds, and
 * functions that add up rows, refuse them: te_dequantize them first. */

/* The two forms of a routing map. */
typedef enum te_map_type {
    TE_MAP_MASK = 0, /* [T, E] u8, i32 or i64: not 0 where a token is routed to an expert */
    TE_MAP_INDEX = 1 /* [T, topk] i32 or i64: the experts of each token */
} te_map_type;

/* inp [T, H] -> [num_out_tokens, H]: a copy of each token for each of its experts, by expert and then by token; rows
 * that nothing comes to are 0. num_out_tokens: mask: at least 1; index: 0 => T * topk, and copies behind the first
 * num_out_tokens are dropped. row_id_map: the map (borrowed from the innermost scope), for te_moe_unpermute. Source:
 * transformer_engine.pytorch.moe_permute. */
TE_API te_tensor *te_moe_permute(te_tensor *inp, te_tensor *routing_map, int64_t num_out_tokens, te_map_type map_type,
                                 te_tensor **row_id_map);
/* The same with a mask map, and the probabilities [T, E], whose entries of the copies become permuted_probs
 * [num_out_tokens], differentiable. A copy whose probability is 0 is a row of zeros. Source:
 * transformer_engine.pytorch.moe_permute_with_probs. */
TE_API te_tensor *te_moe_permute_with_probs(te_tensor *inp, te_tensor *probs, te_tensor *routing_map,
                                            int64_t num_out_tokens, te_tensor **permuted_probs, te_tensor **row_id_map);
/* The other results of te_moe_permute_and_pad_with_probs; all belong to the innermost scope. */
typedef struct te_moe_padded {
    te_tensor *permuted_probs;           /* [num_out_tokens], differentiable; 0 in padding */
    te_tensor *row_id_map;               /* for te_moe_unpermute, with: */
    te_tensor *pad_offsets;              /* i64 [E]: the padding before each expert's rows */
    te_tensor *target_tokens_per_expert; /* i64 [E]: rows of each expert, padding included */
} te_moe_padded;
/* The same with the rows of each expert padded with zeros to a multiple of align_size. tokens_per_expert: i32 or i64
 * [E], the sums of the columns of routing_map. num_out_tokens: rows of the result, at least the sum of the padded
 * sizes: T * topk + E * (align_size - 1) always is; 0 => that sum, for which the host waits (TE_ERR_STATE in a graph's
 * capture). Source: transformer_engine.pytorch.moe_permute_and_pad_with_probs. */
TE_API te_tensor *te_moe_permute_and_pad_with_probs(te_tensor *inp, te_tensor *probs, te_tensor *routing_map,
                                                    te_tensor *tokens_per_expert, int64_t align_size,
                                                    int64_t num_out_tokens, te_moe_padded *made);

/* Options of te_moe_unpermute; zero is a sum over a mask map. */
typedef struct te_moe_unpermute_desc {
    te_tensor *merging_probs; /* factors of the copies, [T, E], or of an index map [T, topk]; NULL => 1, and of an index
                               * map each copy is a token of its own */
    te_map_type map_type;     /* of the routing map that row_id_map was made of */
    te_tensor *pad_offsets;   /* of te_moe_permute_and_pad_with_probs */
} te_moe_unpermute_desc;
/* The sums of each token's copies, in f32: inp [R, H] -> [T, H]. Differentiable in inp and merging_probs. desc may be
 * NULL.
 * Source: transformer_engine.pytorch.moe_unpermute; row_id_map knows restore_shape. */
TE_API te_tensor *te_moe_unpermute(te_tensor *inp, te_tensor *row_id_map, const te_moe_unpermute_desc *desc);

/* The chunks of inp [T, H], whose rows split_sizes [n] counts, in the order sorted_index [n]; both i32 or i64 on the
 * device. Rows behind the last chunk stay where they are. Source:
 * transformer_engine.pytorch.moe_sort_chunks_by_index. */
TE_API te_tensor *te_moe_sort_chunks_by_index(te_tensor *inp, te_tensor *split_sizes, te_tensor *sorted_index);
/* The same, and the numbers probs [T] in the same order: permuted_probs [T], differentiable.
 * Source: transformer_engine.pytorch.moe_sort_chunks_by_index_with_probs. */
TE_API te_tensor *te_moe_sort_chunks_by_index_with_probs(te_tensor *inp, te_tensor *probs, te_tensor *split_sizes,
                                                         te_tensor *sorted_index, te_tensor **permuted_probs);

/* How a router's choice is written. */
typedef enum te_routing_map_format {
    TE_ROUTING_BYTEMAP = 0,  /* u8 [T, E]: 1 where a token goes to an expert */
    TE_ROUTING_BITMAP_U8 = 1 /* u8 [T, ceil(E / 8)]: expert e at bit e % 8 of byte e / 8 */
} te_routing_map_format;
/* A router. */
typedef struct te_fused_topk_desc {
    int topk;                     /* experts of each token; at least 1 */
    bool use_pre_softmax;         /* softmax before the choice */
    int num_groups, group_topk;   /* only experts of the group_topk best of num_groups groups are chosen; 0 => no
                                   * groups */
    float scaling_factor;         /* of the probabilities; 0 => 1 */
    te_score_function score_function; /* 0 => softmax */
    te_tensor *expert_bias;       /* [E], added to sigmoid and sqrtsoftplus scores for the choice alone; NULL => none */
    te_routing_map_format routing_map_format; /* of *routing_map; 0 => bytes */
    te_tensor *topk_indices;      /* i16, i32 or i64 [T, topk], written: the chosen experts, the best one first; NULL =>
                                   * not asked for */
} te_fused_topk_desc;
/* Probabilities of logits [.., E], in their format, 0 for experts that are not chosen, and the choice: *routing_map
 * (NULL: not wanted). te_op_moe_router_fwd has the formulas. At most TE_MOE_MAX_EXPERTS experts. Of equal scores the
 * expert with the lower number is chosen. TransformerEngine does so for topk of 16 and more
 * (NVTE_RADIX_TOPK_THRESHOLD); below it a warp finds the largest, and of equal scores the one wins whose number modulo
 * 32 comes first with its five bits read backwards (0, 16, 8, 24, 4 ..), among these the lower number. With normally
 * distributed bf16 logits, 128 experts and topk 8 that is another choice for 2.6 to 3.5 % of the tokens, by the scale
 * of the logits; scores of f32 logits are hardly ever equal. Source:
 * transformer_engine.pytorch.router.fused_topk_with_score_function. */
TE_API te_tensor *te_fused_topk_with_score_function(te_tensor *logits, const te_fused_topk_desc *desc,
                                                    te_tensor **routing_map);
/* The normalised scores f32 [.., E] of all experts, for an auxiliary loss, and the choice by them: *routing_map (NULL:
 * not wanted).
 * Source: transformer_engine.pytorch.router.fused_compute_score_for_moe_aux_loss. */
TE_API te_tensor *te_fused_compute_score_for_moe_aux_loss(te_tensor *logits, int topk, te_score_function score_function,
                                                          te_routing_map_format routing_map_format,
                                                          te_tensor **routing_map);
/* The numbers of an auxiliary loss. */
typedef struct te_fused_moe_aux_loss_desc {
    int64_t total_num_tokens;           /* T of all ranks and microbatches; or: */
    te_tensor *total_num_tokens_tensor; /* i64 [1], the same on the device; NULL => the number above */
    int num_experts, topk;              /* of the router */
    float coeff;                        /* of the loss */
} te_fused_moe_aux_loss_desc;
/* coeff * num_experts / (topk * T^2) * the sum over experts of tokens_per_expert times the sum of their probs [T, E],
 * in the format of probs, [1]. tokens_per_expert: i32, i64 or float [E]. For a loss of several sequences, probs and
 * tokens_per_expert may have num_experts columns for each.
 * Source: transformer_engine.pytorch.router.fused_moe_aux_loss. */
TE_API te_tensor *te_fused_moe_aux_loss(te_tensor *probs, te_tensor *tokens_per_expert,
                                        const te_fused_moe_aux_loss_desc *desc);

/* Products of the rows of num_gemms groups, each with a weight of its own: y_i = x_i W_i^T + b_i. Parameters: weight0
 * [out, in], weight1 ..., bias0 [out] ...
 * The call says in m_splits or m_splits_tensor how many rows each group has; rows behind the last group give rows of
 * zeros. Either way each group has quantizers of its own, as a Linear: scales and amaxes of its rows alone, no block of
 * two groups, and under delayed scaling histories of its own, which both ways share. With m_splits_tensor the device
 * alone knows the sizes: one launch multiplies all groups, and nothing waits for the host. On the CPU the results have
 * the same bytes as with m_splits, but for stochastic rounding, which draws other numbers; a GPU's codes do, and its
 * products add in another order. With m_splits_tensor a custom recipe's quantizers of product 0 serve the inputs and
 * gradients of all; operands of blocks that are neither 1 x 128 nor, of weights, 128 x 128 are multiplied by their
 * values; and an NVFP4 recipe with row_scaled_activation is refused. return_bias: the output `bias` is [num_gemms,
 * out].
 * Ranks share the products by parallel_mode, and the module exchanges nothing, as TransformerEngine's: whoever moves
 * the rows between ranks does. By column each rank has its columns of the output, and its summand of the input's
 * gradient; by row its summand of the output, whose bias the caller adds behind the sum (no_bias, or return_bias).
 * Source: transformer_engine.pytorch.GroupedLinear. */
typedef struct te_grouped_linear_desc {
    int num_gemms;                     /* groups; 1 to TE_MAX_GEMMS */
    int64_t in_features, out_features; /* last sizes of x and y; at least 1 */
    te_gemm_options gemm;              /* of the products */
    te_parallel_options parallel;      /* parallel_mode is that of each product */
    bool save_original_input;          /* the backward pass quantizes the input again in place of keeping quantized
                                        * copies; refused under delayed scaling */
    const char *name;                  /* copied; NULL => "grouped_linear" */
} te_grouped_linear_desc;
#define TE_MAX_GEMMS 512 /* the most groups of a GroupedLinear */
/* A GroupedLinear. */
TE_API te_module *te_grouped_linear_create(te_ctx *te, const te_grouped_linear_desc *desc);

/* Fp8Padding and Fp8Unpadding. Source: transformer_engine.pytorch.Fp8Padding, Fp8Unpadding. */
typedef struct te_fp8_padding_desc {
    int num_gemms;      /* groups; 1 to TE_MAX_GEMMS */
    int64_t align_size; /* rows of each group are padded to a multiple of it; 0 => by the recipe in force: 32 under
                         * MXFP8, 128 under NVFP4 and custom ones, else 16 */
    const char *name;   /* copied; NULL => "fp8_padding", "fp8_unpadding" */
} te_fp8_padding_desc;
/* Rows of zeros behind each group of the input's rows. The call says in m_splits (the result has the sum of the padded
 * sizes, which args->padded_m_splits receives) or m_splits_tensor (the result has room for any sizes) how many rows
 * each group has. Outputs: out, m_splits (i64 [num_gemms], padded). */
TE_API te_module *te_fp8_padding_create(te_ctx *te, const te_fp8_padding_desc *desc);
/* Takes them out again: m_splits or m_splits_tensor are the sizes before padding. With m_splits_tensor the result has
 * as many rows as the input; those behind the last group are 0. */
TE_API te_module *te_fp8_unpadding_create(te_ctx *te, const te_fp8_padding_desc *desc);
