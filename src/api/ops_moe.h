/* api/ops_moe.h: the raw operations of a mixture of experts; the rules of api/ops.h hold here, too.
 *
 * A router (moe_router) chooses experts for each of T tokens. A map (row_id_map) says at which row each copy of a token
 * stands once the copies are ordered by expert, and moe_permute and moe_unpermute move rows there and back. All sizes
 * that the routing decides stay on the device. T tokens, E experts, R rows of permuted tokens, H the last size. Maps
 * come in two forms:
 *   mask   i32 [T, 2E + 1]: of each token n destination rows, in descending order, then -1 up to E; their n experts,
 *          then -1 up to 2E; n
 *   index  i32 [topk * T]: the destination row of copy k of token t at k * T + t; -1 for a copy that is dropped
 * Rows outside 0 .. R-1 are never touched: such a copy is dropped. */

/* The most splits that one call of te_op_moe_splits takes from the host. */
#define TE_MOE_HOST_SPLITS 64
/* The most experts of a router. */
#define TE_MOE_MAX_EXPERTS 4096

/* Sizes of groups of rows, and what padding each of them to a multiple of `align` makes of them.
 *   sizes    i32 or i64 [n], negative ones count as 0; NULL: the n <= TE_MOE_HOST_SPLITS numbers in `values`, which
 *            travel with the launch
 *   padded   i32 or i64 [n]: sizes rounded up to multiples of align
 *   offsets  optional, i32 or i64 [n]: the padding of all groups before each one, which moe_permute takes as
 *            pad_offsets */
typedef struct te_op_moe_splits_args {
    const te_tensor *sizes;
    te_tensor *padded, *offsets;
    int64_t align; /* 0 => 1; at most 2^31 - 1 */
    int64_t values[TE_MOE_HOST_SPLITS];
} te_op_moe_splits_args;

/* row_id_map (mask) of routing_map [T, E] u8, i32 or i64, where not 0 means routed: by expert, then by token.
 * tokens_per_expert: optional, i32 or i64 [E]. */
typedef struct te_op_moe_mask_map_args {
    const te_tensor *routing_map;
    te_tensor *row_id_map, *tokens_per_expert;
} te_op_moe_mask_map_args;

/* row_id_map (index) of the experts [T, topk], i32 or i64, of each token: sorted by expert, stable. Ids count as 32-bit
 * unsigned numbers, so -1 comes last. Copies behind the first num_out_tokens are dropped. */
typedef struct te_op_moe_index_map_args {
    const te_tensor *experts;
    te_tensor *row_id_map;
    int64_t num_out_tokens; /* 0 => all */
} te_op_moe_index_map_args;

/* local i32 [T, topk] = the place of each of the experts [T, topk], i32 or i64, among the `count` that begin at number
 * `first`: what a rank that has these sorts by.
 * -1 for all others, and for the tokens that `dropped` marks (optional, u8 [T], not 0: padding). tokens_per_expert, i32
 * or i64 [count]: how many copies each gets. */
typedef struct te_op_moe_local_ids_args {
    const te_tensor *experts, *dropped;
    te_tensor *local, *tokens_per_expert;
    int64_t first, count; /* count: at least 1 */
} te_op_moe_local_ids_args;

/* row_id_map (index, topk 1) that moves whole chunks of T rows. sizes: i32 or i64 [n], rows of each chunk, in the order
 * of the input.
 *   sorted_index  optional, i32 or i64 [n]: the chunk that comes first, second ...: a permutation of 0 .. n-1; NULL:
 *                 the order stays. Others are an error (TE_ERR_INVALID): of the call on the CPU, of the next call that
 *                 waits on a GPU
 *   offsets       optional, i32 or i64 [n]: added to the rows of each chunk of the input: padding in front of it. Not
 *                 with sorted_index
 *   chunk_numbers row_id_map holds the number of each row's chunk in place of a row: `groups` of te_op_amax and of the
 *   casts. With neither of the two above
 * Rows behind the last chunk stay where they are, and are -1 with offsets or chunk_numbers. */
typedef struct te_op_moe_chunk_map_args {
    const te_tensor *sizes, *sorted_index, *offsets;
    te_tensor *row_id_map;
    bool chunk_numbers;
} te_op_moe_chunk_map_args;

/* y [R, H] = the rows of x [T, H] where the map sends them, and 0 in rows that nothing comes to. x and y: one format of
 * whole bytes.
 *   topk            of an index map; 0 => row_id_map is a mask map
 *   pad_offsets     optional, i32 or i64 [E], with a mask map: added to the rows of each expert
 *   probs           optional, float [T, E] or [T, topk], with permuted_probs [R] of its format: moved along. Under a
 *                   mask map a copy whose probability is 0 is a row of zeros */
typedef struct te_op_moe_permute_args {
    const te_tensor *x, *row_id_map, *pad_offsets, *probs;
    te_tensor *y, *permuted_probs;
    int64_t topk;
} te_op_moe_permute_args;

/* y [T, H] = the sums of each token's copies among the rows of x [R, H], in f32; a token without copies is 0. x and y
 * float, of any formats.
 *   merging_probs   optional, float [T, E] or [T, topk]: factors of the copies
 *   permuted_probs  optional, float [R], with probs float [T, E] or [T, topk]: moved back; 0 where there is no copy
 * row_id_map, pad_offsets and topk are those of te_op_moe_permute; several copies may name one row, so an index map
 * reads a table as well. */
typedef struct te_op_moe_unpermute_args {
    const te_tensor *x, *row_id_map, *pad_offsets, *merging_probs, *permuted_probs;
    te_tensor *y, *probs;
    int64_t topk;
} te_op_moe_unpermute_args;

/* The gradient of te_op_moe_unpermute with merging_probs: dx [R, H] = dy times the probability of each copy, 0 in rows
 * that no copy comes from; dprobs, of the shape of merging_probs and any float format, = the products of rows of dy and
 * x, 0 where there is no copy. dx, dprobs: optional; x: needed for dprobs, whose map may name a row several times.
 * row_id_map, pad_offsets, topk and merging_probs are the forward's. */
typedef struct te_op_moe_unpermute_bwd_args {
    const te_tensor *dy, *x, *row_id_map, *pad_offsets, *merging_probs;
    te_tensor *dx, *dprobs;
    int64_t topk;
} te_op_moe_unpermute_bwd_args;

/* Scores of logits [T, E], the topk experts of each token, and their probabilities, in f32.
 *   score_function   TE_SCORE_SOFTMAX, TE_SCORE_SIGMOID, or TE_SCORE_SQRTSOFTPLUS: sqrt(log(1 + exp(x)))
 *   use_pre_softmax  softmax over all experts, in place of one over the chosen ones
 *   expert_bias      optional, float [E], not with a softmax over the chosen ones: added to the scores for the choice
 *                    alone
 *   num_groups, group_topk   the experts stand in num_groups groups of equal size; those of group_topk groups may be
 *                    chosen, and a group counts by the sum of its group_best best; 0: no groups
 *   group_best       0 => topk / group_topk
 *   zero_other_groups   the biased scores of groups that are not chosen are multiplied by 0, in place of being left
 *                       out: they still go before negative ones. NaN stays last
 *   norm_topk_prob   probabilities are divided by their sum + 1e-20 if topk > 1 (all_scores: whatever topk is); 0 =>
 *                    unless they are a softmax
 *   bias_in_probs    probabilities are of the biased scores as well
 * Of equal scores the expert with the lower number is chosen (te_fused_topk_with_score_function says where
 * TransformerEngine differs). A chosen expert's probability is scaling_factor times its score, normalised.
 *   all_scores       probs are the scores of all experts, normalised, for an auxiliary loss: softmax over all, or
 *                    divided by the sum of all + 1e-20; the choice is by them. Without groups and scaling_factor, and
 *                    without bias unless bias_in_probs
 *   probs            float [T, E], 0 for what is not chosen; NULL where topk_probs is given
 *   routing_map      optional, u8 [T, E]: 1 for each chosen expert
 *   routing_bits     optional, u8 [T, ceil(E / 8)]: the same, expert e at bit e % 8 of byte e / 8
 *   topk_indices     optional, i16, i32 or i64 [T, topk]: the chosen experts, the best one first
 *   topk_probs       optional, float [T, topk], with topk_indices and without all_scores: their probabilities */
typedef struct te_op_moe_router_fwd_args {
    const te_tensor *logits, *expert_bias;
    te_tensor *probs, *routing_map, *routing_bits, *topk_indices, *topk_probs;
    int topk;
    te_score_function score_function;
    bool use_pre_softmax;
    int num_groups, group_topk, group_best;
    float scaling_factor; /* 0 => 1 */
    bool all_scores;
    te_switch norm_topk_prob;
    bool bias_in_probs;
    bool zero_other_groups;
} te_op_moe_router_fwd_args;
/* dlogits [T, E], float, from dprobs [T, E], the forward's logits and its routing_map (not needed with all_scores); or,
 * where probs were not asked for, from dtopk_probs and topk_indices [T, topk] in the place of both. Indices outside 0
 * .. E-1 are an error (TE_ERR_INVALID): of the call on the CPU, of the next call that waits on a GPU. expert_bias is
 * needed with bias_in_probs alone. topk, score_function, use_pre_softmax, scaling_factor, all_scores, norm_topk_prob
 * and bias_in_probs are the forward's. */
typedef struct te_op_moe_router_bwd_args {
    const te_tensor *logits, *routing_map, *dprobs;
    const te_tensor *topk_indices, *dtopk_probs, *expert_bias;
    te_tensor *dlogits;
    int topk;
    te_score_function score_function;
    bool use_pre_softmax;
    float scaling_factor;
    bool all_scores;
    te_switch norm_topk_prob;
    bool bias_in_probs;
} te_op_moe_router_bwd_args;

/* loss [1], float = coeff * num_experts / (topk * total^2) * the sum over columns e of tokens_per_expert[e] * (the sum
 * of column e of probs [T, C]), in f32.
 * C is num_experts for each of one or more sequences. tokens_per_expert: i32, i64 or float [C]. total is
 * total_num_tokens, or total_device, i64 [1]. */
typedef struct te_op_moe_aux_loss_fwd_args {
    const te_tensor *probs, *tokens_per_expert, *total_device;
    te_tensor *loss;
    int64_t total_num_tokens;
    int num_experts, topk;
    float coeff;
} te_op_moe_aux_loss_fwd_args;
/* dprobs [T, C], float, from dloss [1], float. tokens_per_expert, total_device, total_num_tokens, num_experts, topk and
 * coeff are the forward's. */
typedef struct te_op_moe_aux_loss_bwd_args {
    const te_tensor *dloss, *tokens_per_expert, *total_device;
    te_tensor *dprobs;
    int64_t total_num_tokens;
    int num_experts, topk;
    float coeff;
} te_op_moe_aux_loss_bwd_args;

/* out [groups, N] = the sums of the columns of each group's rows of x [M, N], in f32: bias gradients. sizes: i32 or i64
 * [groups], as te_op_grouped_gemm's. */
typedef struct te_op_grouped_column_sum_args {
    const te_tensor *x, *sizes;
    te_tensor *out;
} te_op_grouped_column_sum_args;
