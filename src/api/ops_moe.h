/* api/ops_moe.h: the args of the raw operations of a mixture of experts. The rules of api/ops.h hold for all of them.
 *
 * A router chooses experts for each of T tokens. A token is copied once for each of its experts, and the copies are
 * ordered by expert. row_id_map names the destination row of each copy. moe_permute moves rows there, and moe_unpermute
 * moves them back. Sizes that depend on the routing stay on the device. Shapes: T tokens, E experts, R rows of permuted
 * tokens, H the size of a row. Maps have two forms:
 *   mask   i32 [T, 2E + 1], one row for each token. n is its number of experts. Entries 0 .. n-1 are its destination
 *          rows in descending order. Entries E .. E+n-1 are the experts. Entry 2E is n. All other entries are -1
 *   index  i32 [topk * T]: entry k * T + t is the destination row of copy k of token t; -1 for a copy that is dropped
 * A copy whose destination is outside 0 .. R-1 is dropped: nothing is read or written there. */

/* The largest number of group sizes that one call of te_op_moe_splits takes from the host. */
#define TE_MOE_HOST_SPLITS 64
/* The largest number of experts of a router. */
#define TE_MOE_MAX_EXPERTS 4096

/* Rounds the sizes of groups of rows up to multiples of `align`.
 *   sizes    i32 or i64 [n]; negative numbers count as 0. NULL => the first n numbers in `values` (n <=
 *            TE_MOE_HOST_SPLITS)
 *   padded   i32 or i64 [n], written: the rounded sizes
 *   offsets  optional, i32 or i64 [n], written: number g counts the padding rows before group g (moe_permute:
 *            pad_offsets) */
typedef struct te_op_moe_splits_args {
    const te_tensor *sizes;
    te_tensor *padded, *offsets;
    int64_t align; /* 0 => 1; at most 2^31 - 1 */
    int64_t values[TE_MOE_HOST_SPLITS];
} te_op_moe_splits_args;

/* Makes row_id_map (mask form) from routing_map (u8, i32 or i64 [T, E]). An element that is not 0 sends the token to
 * the expert. Rows are ordered by expert, then by token. tokens_per_expert is an optional output, i32 or i64 [E]. */
typedef struct te_op_moe_mask_map_args {
    const te_tensor *routing_map;
    te_tensor *row_id_map, *tokens_per_expert;
} te_op_moe_mask_map_args;

/* Makes row_id_map (index form) from `experts` [T, topk], i32 or i64. Copies are sorted stably by expert. Expert
 * numbers are compared as 32-bit unsigned numbers, so -1 comes last. The first num_out_tokens copies are kept. */
typedef struct te_op_moe_index_map_args {
    const te_tensor *experts;
    te_tensor *row_id_map;
    int64_t num_out_tokens; /* 0 => all */
} te_op_moe_index_map_args;

/* Makes the list `local`, by which a rank sorts its copies of tokens. The rank has `count` experts, from expert number
 * `first` on.
 *   experts  i32 or i64 [T, topk]: the ids of the experts of each token
 *   dropped  optional, u8 [T]: not 0 => the token is dropped (padding)
 *   local    i32 [T, topk], written: id - `first`; -1 for experts of other ranks and for dropped tokens
 *   tokens_per_expert   i32 or i64 [count], written: the number of copies for each expert */
typedef struct te_op_moe_local_ids_args {
    const te_tensor *experts, *dropped;
    te_tensor *local, *tokens_per_expert;
    int64_t first, count; /* count: at least 1 */
} te_op_moe_local_ids_args;

/* Makes a row_id_map (index form, topk 1) that moves whole chunks of the T rows.
 *   sizes         i32 or i64 [n]: the number of rows of each chunk, in the order of the input
 *   sorted_index  optional, i32 or i64 [n]: the indices of the chunks in the order of the output. NULL => the order
 *                 stays. TE_ERR_INVALID for a list that is not a permutation, on the CPU from this call, on a GPU from
 *                 the next call that waits
 *   offsets       optional, i32 or i64 [n]: offsets[i] is added to the destination rows of chunk i (padding). Not with
 *                 sorted_index
 *   chunk_numbers   true: row_id_map[i] becomes the index of the chunk that contains row i. te_op_amax and the casts
 *                   take such a row_id_map as `groups`. Not with sorted_index or offsets
 * Rows behind the last chunk do not move. Exception: with offsets or chunk_numbers their entries of row_id_map are
 * -1. */
typedef struct te_op_moe_chunk_map_args {
    const te_tensor *sizes, *sorted_index, *offsets;
    te_tensor *row_id_map;
    bool chunk_numbers;
} te_op_moe_chunk_map_args;

/* Copies each row of x [T, H] to the rows of y [R, H] that the map names for it. Rows of y without a copy become 0. x
 * and y have one format, not e2m1.
 *   topk            the topk of an index map; 0 means that row_id_map is a mask map
 *   pad_offsets     optional, i32 or i64 [E], for a mask map: pad_offsets[e] is added to the destination rows of expert
 *                   e
 *   probs           optional, float [T, E] or [T, topk]: the probabilities of the copies, which go to permuted_probs
 *                   [R], of probs' format. With a mask map, a copy with probability 0 becomes a row of zeros */
typedef struct te_op_moe_permute_args {
    const te_tensor *x, *row_id_map, *pad_offsets, *probs;
    te_tensor *y, *permuted_probs;
    int64_t topk;
} te_op_moe_permute_args;

/* Row t of y [T, H] becomes the sum of the rows of x [R, H] that are copies of token t, in f32; 0 without copies. x and
 * y may have different float formats.
 *   merging_probs   optional, float [T, E] or [T, topk]: factors by which the copies are multiplied
 *   permuted_probs  optional, float [R], together with probs: its numbers are moved back to probs, float [T, E] or [T,
 *                   topk]; 0 where there is no copy
 * row_id_map, pad_offsets and topk are as in te_op_moe_permute. Several entries of row_id_map may name one row. */
typedef struct te_op_moe_unpermute_args {
    const te_tensor *x, *row_id_map, *pad_offsets, *merging_probs, *permuted_probs;
    te_tensor *y, *probs;
    int64_t topk;
} te_op_moe_unpermute_args;

/* Computes the gradient of te_op_moe_unpermute with merging_probs.
 *   dx      [R, H], optional: for each copy, its token's row of dy times its probability; 0 without a copy
 *   dprobs  optional, any float format, in the shape of merging_probs: for each copy, the dot product of its token's
 *           row of dy and its own row of x; 0 without a copy. Several copies may have one row of x
 *   x       needed for dprobs
 * row_id_map, pad_offsets, topk and merging_probs are the forward's. */
typedef struct te_op_moe_unpermute_bwd_args {
    const te_tensor *dy, *x, *row_id_map, *pad_offsets, *merging_probs;
    te_tensor *dx, *dprobs;
    int64_t topk;
} te_op_moe_unpermute_bwd_args;

/* Computes the scores of logits [T, E], the topk experts of each token, and their probabilities, in f32. Of equal
 * scores the one with the lower index is chosen (te_fused_topk_with_score_function says where TransformerEngine
 * differs). The probability of a chosen expert is its score, normalised, times scaling_factor.
 *   score_function   TE_SCORE_SOFTMAX, TE_SCORE_SIGMOID, or TE_SCORE_SQRTSOFTPLUS: sqrt(log(1 + exp(x)))
 *   use_pre_softmax  true: the softmax is over all experts; false: it is over the chosen experts
 *   expert_bias      optional, float [E]: added to the scores for the choice alone. Not with a softmax over the chosen
 *                    experts
 *   num_groups, group_topk   the experts form num_groups groups of equal size, and are chosen only from the group_topk
 *                            best groups. 0 => no groups
 *   group_best       a group is ranked by the sum of its best scores; group_best is their number. 0 => topk /
 *                    group_topk
 *   zero_other_groups   true: biased scores in the other groups are multiplied by 0; these experts may still be chosen.
 *                       A NaN score is still ranked last
 *   norm_topk_prob   TE_ON: probabilities are divided by their sum + 1e-20 if topk > 1 (all_scores: for any topk). 0 =>
 *                    TE_ON, or TE_OFF for softmax scores
 *   bias_in_probs    true: the probabilities come from the biased scores as well
 *   all_scores       true: probs are the normalised scores of all experts, for an auxiliary loss: a softmax, or scores
 *                    divided by their sum + 1e-20. These scores decide the choice. Not with groups or scaling_factor;
 *                    with a bias only if bias_in_probs
 *   probs            float [T, E], 0 for experts that are not chosen; NULL where topk_probs is given
 *   routing_map      optional, u8 [T, E]: 1 for each chosen expert
 *   routing_bits     optional, u8 [T, ceil(E / 8)]: routing_map as bits; expert e is bit e % 8 of byte e / 8
 *   topk_indices     optional, i16, i32 or i64 [T, topk]: the chosen experts, the best one first
 *   topk_probs       optional, float [T, topk]: the probabilities of topk_indices. Not with all_scores */
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
/* Computes the gradient of te_op_moe_router_fwd: dlogits [T, E], float, from dprobs [T, E], and the forward's logits
 * and routing_map (not needed with all_scores). dtopk_probs and topk_indices [T, topk] may replace dprobs and
 * routing_map. TE_ERR_INVALID for indices outside 0 .. E-1, on a GPU from the next call that waits. expert_bias: only
 * with bias_in_probs. */
typedef struct te_op_moe_router_bwd_args {
    const te_tensor *logits, *routing_map, *dprobs;
    const te_tensor *topk_indices, *dtopk_probs, *expert_bias;
    te_tensor *dlogits;
    int topk; /* the forward's */
    te_score_function score_function; /* the forward's */
    bool use_pre_softmax; /* the forward's */
    float scaling_factor; /* the forward's */
    bool all_scores; /* the forward's */
    te_switch norm_topk_prob; /* the forward's */
    bool bias_in_probs; /* the forward's */
} te_op_moe_router_bwd_args;

/* Computes loss [1], float, in f32:
 *   loss = coeff * num_experts / (topk * total^2) * (sum over columns e of tokens_per_expert[e] * P[e])
 * P[e] is the sum of column e of probs [T, C]. C is num_experts times the number of sequences. tokens_per_expert is
 * i32, i64 or float [C]. `total` is total_device (i64 [1], optional), else total_num_tokens. */
typedef struct te_op_moe_aux_loss_fwd_args {
    const te_tensor *probs, *tokens_per_expert, *total_device;
    te_tensor *loss;
    int64_t total_num_tokens;
    int num_experts, topk;
    float coeff;
} te_op_moe_aux_loss_fwd_args;
/* Computes the gradient of te_op_moe_aux_loss_fwd: dprobs [T, C], float, from dloss [1], float. */
typedef struct te_op_moe_aux_loss_bwd_args {
    const te_tensor *dloss, *tokens_per_expert, *total_device; /* all but dloss are the forward's */
    te_tensor *dprobs;
    int64_t total_num_tokens; /* the forward's */
    int num_experts, topk; /* the forward's */
    float coeff; /* the forward's */
} te_op_moe_aux_loss_bwd_args;

/* Row g of `out` [groups, N] becomes the column sums of x [M, N] over the rows of group g, in f32. `sizes`: i32 or i64
 * [groups], as in te_op_grouped_gemm. */
typedef struct te_op_grouped_column_sum_args {
    const te_tensor *x, *sizes;
    te_tensor *out;
} te_op_grouped_column_sum_args;
