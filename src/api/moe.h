/* api/moe.h: mixtures of experts, with the functions and modules of TransformerEngine under their names. T is the
 * number of tokens and E the number of experts. The functions follow the rules of api/functions.h. api/ops_moe.h
 * describes row_id_map.
 * A function waits for the device only if its comment says so: the sizes that a router decides may stay on the device,
 * and may differ between launches of a graph.
 *
 * These arguments of TransformerEngine do not exist here:
 *   - `max_token_num`: the size of a workspace, which te.h allocates as needed
 *   - `probs` of moe_unpermute: an old name of merging_probs
 *   - `qb_histogram`, `qb_bin_bounds`, `qb_histogram_mode`: for quantile balancing, which is not implemented yet
 *   - `use_grouped_tensor`: selects one of two implementations of GroupedLinear. Here m_splits selects the one, and
 *     m_splits_tensor the other
 *   - `single_grouped_weight`, `single_grouped_bias`: make one parameter of all weights, or of all biases. Here they
 *     always are parts of one tensor, and each has its own name
 *
 * Functions that only move rows (te_moe_permute.., te_moe_sort_chunks_by_index..) take three kinds of quantized inputs:
 *   - FP8 with one scale per tensor
 *   - FP8 with 1 x 128 blocks
 *   - MXFP8 with scales that are not swizzled
 *
 * The result is then quantized: it has the row-wise codes with their scales, but no column-wise copy. Gradients are not
 * quantized. Other kinds of quantized inputs are refused. Functions that add up rows refuse every quantized input. Call
 * te_dequantize for refused inputs. */

/* The two forms of a routing map. */
typedef enum te_map_type {
    TE_MAP_MASK = 0, /* [T, E] u8, i32 or i64: not 0 where a token is routed to an expert */
    TE_MAP_INDEX = 1 /* [T, topk] i32 or i64: the experts of each token */
} te_map_type;

/* Copies each token of inp [T, H] once for each of its experts -> [num_out_tokens, H]. Rows are ordered by expert, then
 * by token. *row_id_map receives the map for te_moe_unpermute (borrowed from the innermost scope).
 * Rows that no token fills are 0. With a mask map, num_out_tokens must be at least 1. With an index map, 0 means T *
 * topk, and copies behind the first num_out_tokens are dropped.
 * Source: transformer_engine.pytorch.moe_permute. */
TE_API te_tensor *te_moe_permute(te_tensor *inp, te_tensor *routing_map, int64_t num_out_tokens, te_map_type map_type,
                                 te_tensor **row_id_map);
/* Permutes tokens as te_moe_permute does with a mask map, and also their probabilities probs [T, E]. *permuted_probs
 * [num_out_tokens] receives the probability of each copy's token and expert, differentiable in probs. A copy with
 * probability 0 is a row of zeros.
 * Source: transformer_engine.pytorch.moe_permute_with_probs. */
TE_API te_tensor *te_moe_permute_with_probs(te_tensor *inp, te_tensor *probs, te_tensor *routing_map,
                                            int64_t num_out_tokens, te_tensor **permuted_probs, te_tensor **row_id_map);
/* The results of te_moe_permute_and_pad_with_probs besides the returned tensor. All tensors belong to the innermost
 * scope. */
typedef struct te_moe_padded {
    te_tensor *permuted_probs;           /* [num_out_tokens], differentiable; 0 in padding */
    te_tensor *row_id_map;               /* for te_moe_unpermute, together with pad_offsets */
    te_tensor *pad_offsets;              /* i64 [E]: the number of padding rows in front of each expert's rows */
    te_tensor *target_tokens_per_expert; /* i64 [E]: the number of rows of each expert, padding included */
} te_moe_padded;
/* Permutes as te_moe_permute_with_probs, and pads the rows of each expert with zeros to a multiple of align_size.
 * tokens_per_expert: i32 or i64 [E], the sums of the columns of routing_map.
 * num_out_tokens: the rows of the result, at least the sum of the padded sizes; T * topk + E * (align_size - 1) is
 * always enough. 0 => exactly the sum of the padded sizes, for which the host waits (TE_ERR_STATE in a graph's
 * capture).
 * Source: transformer_engine.pytorch.moe_permute_and_pad_with_probs. */
TE_API te_tensor *te_moe_permute_and_pad_with_probs(te_tensor *inp, te_tensor *probs, te_tensor *routing_map,
                                                    te_tensor *tokens_per_expert, int64_t align_size,
                                                    int64_t num_out_tokens, te_moe_padded *made);

/* Options of te_moe_unpermute. All zero => row_id_map was made from a mask map, and each token's copies are added. */
typedef struct te_moe_unpermute_desc {
    te_tensor *merging_probs; /* factors of the copies: [T, E] with a mask map, [T, topk] with an index map. NULL =>
                               * with a mask map the factors are 1; with an index map nothing is summed, and each copy
                               * stays a row */
    te_map_type map_type;     /* form of the routing map that row_id_map was made from */
    te_tensor *pad_offsets;   /* pad_offsets from te_moe_permute_and_pad_with_probs; NULL => no padding */
} te_moe_unpermute_desc;
/* Sums each token's copies in f32: inp [R, H] -> [T, H]. Differentiable in inp and merging_probs. desc may be NULL.
 * Source: transformer_engine.pytorch.moe_unpermute, without restore_shape (row_id_map gives the shape). */
TE_API te_tensor *te_moe_unpermute(te_tensor *inp, te_tensor *row_id_map, const te_moe_unpermute_desc *desc);

/* Reorders the chunks of rows of inp [T, H]: chunk i has split_sizes[i] rows, and sorted_index lists the chunks in
 * their new order. Both are i32 or i64 [n], on the device. Rows behind the last chunk do not move.
 * Source: transformer_engine.pytorch.moe_sort_chunks_by_index. */
TE_API te_tensor *te_moe_sort_chunks_by_index(te_tensor *inp, te_tensor *split_sizes, te_tensor *sorted_index);
/* Reorders inp as te_moe_sort_chunks_by_index does. Reorders probs [T] in the same way into *permuted_probs [T], which
 * is differentiable.
 * Source: transformer_engine.pytorch.moe_sort_chunks_by_index_with_probs. */
TE_API te_tensor *te_moe_sort_chunks_by_index_with_probs(te_tensor *inp, te_tensor *probs, te_tensor *split_sizes,
                                                         te_tensor *sorted_index, te_tensor **permuted_probs);

/* The format of the map in which a router writes its choice. */
typedef enum te_routing_map_format {
    TE_ROUTING_BYTEMAP = 0,  /* u8 [T, E]: 1 where a token goes to an expert */
    TE_ROUTING_BITMAP_U8 = 1 /* u8 [T, ceil(E / 8)]: expert e at bit e % 8 of byte e / 8 */
} te_routing_map_format;
/* Options of the router te_fused_topk_with_score_function. */
typedef struct te_fused_topk_desc {
    int topk;                     /* number of experts for each token; at least 1 */
    bool use_pre_softmax;         /* true => softmax over all experts, before the choice; false => over the chosen
                                   * ones */
    int num_groups, group_topk;   /* experts are chosen only from the group_topk best of num_groups groups; 0 => no
                                   * groups */
    float scaling_factor;         /* factor of the probabilities; 0 => 1 */
    te_score_function score_function; /* 0 => softmax. (In TransformerEngine it has no default: it is required) */
    te_tensor *expert_bias;       /* [E], added to sigmoid and sqrtsoftplus scores for the choice of experts, but not
                                   * for their probabilities; NULL => none */
    te_routing_map_format routing_map_format; /* format of *routing_map; 0 => bytes */
    te_tensor *topk_indices;      /* i16, i32 or i64 [T, topk], written: the chosen experts, the best one first; NULL =>
                                   * not written */
} te_fused_topk_desc;
/* Computes the probabilities of the chosen experts from logits [.., E], by the formulas of te_op_moe_router_fwd.
 * Returns them as [.., E] in the logits' format, 0 for other experts. Writes the choice to *routing_map (may be NULL).
 * At most TE_MOE_MAX_EXPERTS experts.
 *
 * Of experts with equal scores, the one with the lower index is chosen. TransformerEngine does so only for topk of 16
 * and more (NVTE_RADIX_TOPK_THRESHOLD). Below 16 it orders equal scores by the bit-reversed index modulo 32 (0, 16, 8,
 * 24, 4 ..), then by the index. So with bf16 logits a few percent of the tokens get other experts than in
 * TransformerEngine, depending on the scale of the logits; with f32 logits hardly any do.
 * Source: transformer_engine.pytorch.router.fused_topk_with_score_function. */
TE_API te_tensor *te_fused_topk_with_score_function(te_tensor *logits, const te_fused_topk_desc *desc,
                                                    te_tensor **routing_map);
/* Returns the normalised scores of all experts for an auxiliary loss, f32 [.., E]. Writes the choice of the topk
 * highest scores to *routing_map (may be NULL).
 * Source: transformer_engine.pytorch.router.fused_compute_score_for_moe_aux_loss. */
TE_API te_tensor *te_fused_compute_score_for_moe_aux_loss(te_tensor *logits, int topk, te_score_function score_function,
                                                          te_routing_map_format routing_map_format,
                                                          te_tensor **routing_map);
/* Options of te_fused_moe_aux_loss. */
typedef struct te_fused_moe_aux_loss_desc {
    int64_t total_num_tokens;           /* T, the tokens of all ranks and microbatches; not read with
                                         * total_num_tokens_tensor */
    te_tensor *total_num_tokens_tensor; /* T as i64 [1] on the device; NULL => total_num_tokens */
    int num_experts, topk;              /* of the router */
    float coeff;                        /* factor of the loss */
} te_fused_moe_aux_loss_desc;
/* Returns coeff * num_experts / (topk * T^2) * sum over experts e of tokens_per_expert[e] * (sum of column e of probs
 * [T, E]), as [1] in the format of probs. tokens_per_expert is i32, i64 or float [E]. For several sequences, both
 * inputs may have num_experts columns for each sequence.
 * Source: transformer_engine.pytorch.router.fused_moe_aux_loss. */
TE_API te_tensor *te_fused_moe_aux_loss(te_tensor *probs, te_tensor *tokens_per_expert,
                                        const te_fused_moe_aux_loss_desc *desc);

/* Options of a GroupedLinear. It multiplies num_gemms groups of rows, each by its own weight: y_i = x_i W_i^T + b_i.
 * Parameters: weight0 [out, in], weight1 and so on, bias0 [out], bias1 and so on.
 *
 * The call gives the number of rows of each group in m_splits or m_splits_tensor; rows behind the last group give
 * zeros. Each group has its own quantizers: scales, amaxes and delayed scaling's amax history are those of its rows
 * alone, and no scaling block spans two groups. With return_bias the output `bias` is [num_gemms, out].
 *
 * With m_splits_tensor one launch multiplies all groups, and the host does not wait. Compared with m_splits:
 *   - on the CPU, results have the same bytes, except under stochastic rounding, which draws other random numbers
 *   - on a GPU, codes have the same bytes, but the GEMMs add in another order
 *   - under a custom recipe, the quantizers of GEMM 0 quantize the inputs and gradients of all groups
 *   - quantized operands are decoded before the GEMM, except FP8 with one scale per tensor, and FP8 with blocks of
 *     1 x 128 for inputs and gradients and 128 x 128 for weights
 *   - an NVFP4 recipe with row_scaled_activation is refused
 *
 * parallel_mode splits each GEMM over ranks. As in TransformerEngine, the module does not communicate: the caller moves
 * rows between ranks and adds up the summands of all ranks. With splits by column, each rank gets its columns of the
 * output and its summand of the input's gradient. With splits by row, each rank gets its summand of the output; the
 * caller adds the bias after the sum, so no_bias or return_bias must be set.
 * Source: transformer_engine.pytorch.GroupedLinear. */
typedef struct te_grouped_linear_desc {
    int num_gemms;                     /* groups; 1 to TE_MAX_GEMMS */
    int64_t in_features, out_features; /* last sizes of x and y; at least 1 */
    te_gemm_options gemm;              /* options of the GEMMs */
    te_parallel_options parallel;      /* parallel_mode splits each GEMM */
    bool save_original_input;          /* true => the input itself is saved and quantized again in the backward pass;
                                        * false => quantized copies are saved. true is refused under delayed scaling,
                                        * and for an input quantizer that rounds stochastically */
    const char *name;                  /* copied; NULL => "grouped_linear" */
} te_grouped_linear_desc;
/* Makes a GroupedLinear. */
TE_API te_module *te_grouped_linear_create(te_ctx *te, const te_grouped_linear_desc *desc);

/* Options of Fp8Padding and Fp8Unpadding. Source: transformer_engine.pytorch.Fp8Padding, Fp8Unpadding. */
typedef struct te_fp8_padding_desc {
    int num_gemms;      /* groups; 1 to TE_MAX_GEMMS */
    int64_t align_size; /* each group's rows are padded to a multiple of this; 0 => by the recipe in force: 32 under
                         * MXFP8, 128 under NVFP4 and custom recipes, else 16 */
    const char *name;   /* copied; NULL => "fp8_padding", "fp8_unpadding" */
} te_fp8_padding_desc;
/* Makes an Fp8Padding, which adds rows of zeros behind each group of the input's rows. m_splits or m_splits_tensor has
 * the number of rows of each group.
 * With m_splits, args->padded_m_splits receives the padded sizes, and the result has as many rows as their sum. With
 * m_splits_tensor, the result has enough rows for any sizes.
 * Outputs: out, m_splits (i64 [num_gemms], the padded sizes). */
TE_API te_module *te_fp8_padding_create(te_ctx *te, const te_fp8_padding_desc *desc);
/* Makes an Fp8Unpadding, which removes the rows of Fp8Padding. m_splits or m_splits_tensor has the sizes before
 * padding. With m_splits_tensor the result has as many rows as the input; rows behind the last group are 0. */
TE_API te_module *te_fp8_unpadding_create(te_ctx *te, const te_fp8_padding_desc *desc);
