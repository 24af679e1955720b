/* api/ops_moe.h: the args of the raw operations of a mixture of experts. The rules of api/ops.h hold for all of them.
 *
 * A router (moe_router) chooses experts for each of T tokens. A token is copied once for each of its experts, and the
 * copies are ordered by expert. A map (row_id_map) names the destination row of each copy; moe_permute moves rows there
 * and moe_unpermute moves them back. All sizes that depend on the routing stay on the device. In the shapes below T is
 * the number of tokens, E the number of experts, R the number of rows of permuted tokens, and H the size of a row. Maps
 * come in two forms:
 *   mask   i32 [T, 2E + 1], one row for each token. If the token has n experts, entries 0 .. n-1 are its n destination
 *          rows in descending order, and entries n .. E-1 are -1. Entries E .. E+n-1 are the n experts, and entries E+n
 *          .. 2E-1 are -1. The last entry, 2E, is n
 *   index  i32 [topk * T]: entry k * T + t is the destination row of copy k of token t; -1 for a copy that is dropped
 * A copy whose destination is outside 0 .. R-1 is dropped: nothing is read or written there. */

/* The largest number of group sizes that one call of te_op_moe_splits takes from the host. */
#define TE_MOE_HOST_SPLITS 64
/* The largest number of experts of a router. */
#define TE_MOE_MAX_EXPERTS 4096

/* Rounds the sizes of groups of rows up to multiples of `align`.
 *   sizes    i32 or i64 [n]; negative numbers count as 0. If NULL, the sizes are the first n numbers in `values` (n <=
 *            TE_MOE_HOST_SPLITS), which are passed as arguments of the kernel
 *   padded   i32 or i64 [n], written: the rounded sizes
 *   offsets  optional, i32 or i64 [n], written: number g is the sum of the padding rows in all groups before group g.
 *            moe_permute takes this list as pad_offsets */
typedef struct te_op_moe_splits_args {
    const te_tensor *sizes;
    te_tensor *padded, *offsets;
    int64_t align; /* 0 => 1; at most 2^31 - 1 */
    int64_t values[TE_MOE_HOST_SPLITS];
} te_op_moe_splits_args;

/* Makes row_id_map, in the mask form that the top of this file describes, from routing_map [T, E], u8, i32 or i64. A
 * number other than 0 in routing_map means that the token goes to the expert. Destination rows are ordered by expert,
 * then by token. tokens_per_expert: optional, i32 or i64 [E], written. */
typedef struct te_op_moe_mask_map_args {
    const te_tensor *routing_map;
    te_tensor *row_id_map, *tokens_per_expert;
} te_op_moe_mask_map_args;

/* Makes row_id_map, in the index form that the top of this file describes, from `experts` [T, topk], i32 or i64, the
 * experts of each token. A token has one copy for each of its experts. Copies are sorted by expert, stably. Experts are
 * compared as 32-bit unsigned numbers, so -1 comes last. Only the first num_out_tokens sorted copies are kept; the
 * others are dropped. */
typedef struct te_op_moe_index_map_args {
    const te_tensor *experts;
    te_tensor *row_id_map;
    int64_t num_out_tokens; /* 0 => all */
} te_op_moe_index_map_args;

/* Makes the list `local`, by which a rank sorts its copies of tokens. The rank has the `count` experts with the ids
 * `first` .. `first` + `count` - 1.
 *   experts  i32 or i64 [T, topk]: the ids of the experts of each token
 *   dropped  optional, u8 [T]: a number other than 0 marks a token that is dropped (padding)
 *   local    i32 [T, topk], written: the id of each expert, minus `first`; -1 for experts of other ranks and for
 *            dropped tokens
 *   tokens_per_expert   i32 or i64 [count], written: how many copies each of the `count` experts gets */
typedef struct te_op_moe_local_ids_args {
    const te_tensor *experts, *dropped;
    te_tensor *local, *tokens_per_expert;
    int64_t first, count; /* count: at least 1 */
} te_op_moe_local_ids_args;

/* Makes a row_id_map (index form, topk 1) that moves whole chunks of the T rows.
 *   sizes         i32 or i64 [n]: the number of rows of each chunk, in the order of the input
 *   sorted_index  optional, i32 or i64 [n], a permutation of 0 .. n-1: the indices of the chunks in the order of the
 *                 output. If NULL, the order stays. A list that is not a permutation is an error (TE_ERR_INVALID). On
 *                 the CPU the call itself returns the error, on a GPU the next call that waits
 *   offsets       optional, i32 or i64 [n]: offsets[i] is added to the destination rows of chunk i, for the padding in
 *                 front of the chunk. Not with sorted_index
 *   chunk_numbers   true: row_id_map[i] becomes the index of the chunk that row i belongs to, not a destination row.
 *                   te_op_amax and the casts take such a row_id_map as `groups`. Not with sorted_index or offsets
 * Rows behind the last chunk stay where they are, except with offsets or chunk_numbers: then their entries
 * of row_id_map are -1. */
typedef struct te_op_moe_chunk_map_args {
    const te_tensor *sizes, *sorted_index, *offsets;
    te_tensor *row_id_map;
    bool chunk_numbers;
} te_op_moe_chunk_map_args;

/* Copies each row of x [T, H] to the rows of y [R, H] that the map names for this row. Rows of y without a copy become
 * 0. x and y have the same format, whose elements are whole bytes.
 *   topk            the topk of an index map; 0 means that row_id_map is a mask map
 *   pad_offsets     optional, i32 or i64 [E], with a mask map only: pad_offsets[e] is added to the destination rows of
 *                   expert e
 *   probs           optional, float [T, E] or [T, topk]: the probability of each copy. It is written to permuted_probs
 *                   [R], of the same format, at the copy's row. With a mask map, a copy whose probability is 0 becomes
 *                   a row of zeros */
typedef struct te_op_moe_permute_args {
    const te_tensor *x, *row_id_map, *pad_offsets, *probs;
    te_tensor *y, *permuted_probs;
    int64_t topk;
} te_op_moe_permute_args;

/* Sums the copies of each token. Row t of y [T, H] becomes the sum of the rows of x [R, H] that are copies of token t,
 * in f32; it becomes 0 if token t has no copies. x and y may have different float formats.
 *   merging_probs   optional, float [T, E] or [T, topk]: factors by which the copies are multiplied
 *   permuted_probs  optional, float [R], given together with probs. Its numbers are moved back to probs, float [T, E]
 *                   or [T, topk]; probs becomes 0 where there is no copy
 * row_id_map, pad_offsets and topk are as in te_op_moe_permute. Several entries of row_id_map may name the same row,
 * so with an index map the operation can also serve as a table lookup. */
typedef struct te_op_moe_unpermute_args {
    const te_tensor *x, *row_id_map, *pad_offsets, *merging_probs, *permuted_probs;
    te_tensor *y, *probs;
    int64_t topk;
} te_op_moe_unpermute_args;

/* Computes the gradient of te_op_moe_unpermute with merging_probs.
 *   dx      [R, H], optional. The row of a copy becomes its token's row of dy times the probability of the copy. Rows
 *           without a copy become 0
 *   dprobs  optional, of any float format, in the shape of merging_probs. The entry of a copy becomes the dot product
 *           of the token's row of dy and the copy's row of x; several copies may have the same row of x.
 *           An entry without a copy becomes 0
 *   x       needed for dprobs
 * row_id_map, pad_offsets, topk and merging_probs are the forward's. */
typedef struct te_op_moe_unpermute_bwd_args {
    const te_tensor *dy, *x, *row_id_map, *pad_offsets, *merging_probs;
    te_tensor *dx, *dprobs;
    int64_t topk;
} te_op_moe_unpermute_bwd_args;

/* Computes the scores of logits [T, E], the topk experts of each token, and their probabilities, in f32. Of equal
 * scores the expert with the lower index is chosen (te_fused_topk_with_score_function says where TransformerEngine
 * differs). The probability of a chosen expert is its score, normalised, times scaling_factor.
 *   score_function   TE_SCORE_SOFTMAX, TE_SCORE_SIGMOID, or TE_SCORE_SQRTSOFTPLUS: sqrt(log(1 + exp(x)))
 *   use_pre_softmax  true: the softmax is over all experts; false: it is over the chosen experts
 *   expert_bias      optional, float [E]: added to the scores for the choice alone. Not with a softmax over the chosen
 *                    experts
 *   num_groups, group_topk   the experts form num_groups groups of equal size, and only experts of the group_topk best
 *                            groups may be chosen. A group is ranked by the sum of its group_best best scores. 0 means
 *                            no groups
 *   group_best       0 => topk / group_topk
 *   zero_other_groups   true: the biased scores of experts in the other groups are multiplied by 0, and these experts
 *                       may still be chosen. A NaN score is still ranked last
 *   norm_topk_prob   TE_ON: the probabilities are divided by their sum + 1e-20 if topk > 1 (with all_scores for any
 *                    topk). 0 means TE_ON, or TE_OFF for softmax scores
 *   bias_in_probs    true: the probabilities come from the biased scores as well
 *   all_scores       true: probs are the normalised scores of all experts, for an auxiliary loss: a softmax over all
 *                    experts, or scores divided by the sum of all scores + 1e-20. The experts are chosen by these
 *                    numbers. Not with groups or scaling_factor, and with a bias only if bias_in_probs
 *   probs            float [T, E], 0 for experts that are not chosen; NULL where topk_probs is given
 *   routing_map      optional, u8 [T, E]: 1 for each chosen expert
 *   routing_bits     optional, u8 [T, ceil(E / 8)]: the routing_map as bits. Expert e is bit e % 8 of byte e / 8
 *   topk_indices     optional, i16, i32 or i64 [T, topk]: the chosen experts, the best one first
 *   topk_probs       optional, float [T, topk], with topk_indices and without all_scores: the probabilities of
 *                    topk_indices */
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
/* Computes the gradient of te_op_moe_router_fwd: dlogits [T, E], float, from dprobs [T, E], the forward's logits and
 * the forward's routing_map (not needed with all_scores). If the forward made topk_probs in place of probs, dtopk_probs
 * and topk_indices [T, topk] take the place of dprobs and routing_map. Indices outside 0 .. E-1 are an error
 * (TE_ERR_INVALID). On the CPU the call itself returns the error, on a GPU the next call that waits. expert_bias is
 * needed only with bias_in_probs. topk, score_function, use_pre_softmax, scaling_factor, all_scores, norm_topk_prob and
 * bias_in_probs are the forward's. */
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

/* Computes loss [1], float, in f32:
 *   loss = coeff * num_experts / (topk * total^2) * (sum over columns e of tokens_per_expert[e] * P[e])
 * P[e] is the sum of column e of probs [T, C], and C is num_experts times the number of sequences. tokens_per_expert is
 * i32, i64 or float [C]. `total` is total_device, i64 [1], if that is given, else total_num_tokens. */
typedef struct te_op_moe_aux_loss_fwd_args {
    const te_tensor *probs, *tokens_per_expert, *total_device;
    te_tensor *loss;
    int64_t total_num_tokens;
    int num_experts, topk;
    float coeff;
} te_op_moe_aux_loss_fwd_args;
/* Computes the gradient of te_op_moe_aux_loss_fwd: dprobs [T, C], float, from dloss [1], float. tokens_per_expert,
 * total_device, total_num_tokens, num_experts, topk and coeff are the forward's. */
typedef struct te_op_moe_aux_loss_bwd_args {
    const te_tensor *dloss, *tokens_per_expert, *total_device;
    te_tensor *dprobs;
    int64_t total_num_tokens;
    int num_experts, topk;
    float coeff;
} te_op_moe_aux_loss_bwd_args;

/* Computes bias gradients of groups of rows. Row g of `out` [groups, N] becomes the column sums of those rows of x
 * [M, N] that belong to group g, in f32. `sizes`, i32 or i64 [groups], is the number of rows of each group, as in
 * te_op_grouped_gemm. */
typedef struct te_op_grouped_column_sum_args {
    const te_tensor *x, *sizes;
    te_tensor *out;
} te_op_grouped_column_sum_args;
