/* api/ops_moe.h: the args of the raw operations of a mixture of experts. The rules of api/ops.h hold for all of them.
 *
 * A router (moe_router) chooses experts for each of T tokens. A token is copied once for each of its experts, and the
 * copies are ordered by expert. A map (row_id_map) says which row each copy gets; moe_permute moves rows there and
 * moe_unpermute moves them back. All sizes that depend on the routing stay on the device. T tokens, E experts, R rows
 * of permuted tokens, H the last size. Maps come in two forms:
 *   mask   i32 [T, 2E + 1]. Of each token with n experts: entries 0 .. n-1 are the n destination rows, in descending
 *          order, then -1 up to entry E; entries E .. E+n-1 are the n experts, then -1 up to entry 2E; the last entry
 *          is n
 *   index  i32 [topk * T]: entry k * T + t is the destination row of copy k of token t; -1 for a copy that is dropped
 * A copy whose destination is outside 0 .. R-1 is dropped: such rows are never touched. */

/* The most splits that one call of te_op_moe_splits takes from the host. */
#define TE_MOE_HOST_SPLITS 64
/* The most experts of a router. */
#define TE_MOE_MAX_EXPERTS 4096

/* Rounds the sizes of groups of rows up to multiples of `align`.
 *   sizes    i32 or i64 [n]; negative ones count as 0. NULL: the n <= TE_MOE_HOST_SPLITS numbers in `values`, which
 *            travel with the launch
 *   padded   i32 or i64 [n], written: the rounded sizes
 *   offsets  optional, i32 or i64 [n], written: the number of padding rows in all groups before each group, which
 *            moe_permute takes as pad_offsets */
typedef struct te_op_moe_splits_args {
    const te_tensor *sizes;
    te_tensor *padded, *offsets;
    int64_t align; /* 0 => 1; at most 2^31 - 1 */
    int64_t values[TE_MOE_HOST_SPLITS];
} te_op_moe_splits_args;

/* Makes row_id_map (mask) from routing_map [T, E], u8, i32 or i64, in which a number other than 0 means routed. Rows
 * are ordered by expert, then by token. tokens_per_expert: optional, i32 or i64 [E], written. */
typedef struct te_op_moe_mask_map_args {
    const te_tensor *routing_map;
    te_tensor *row_id_map, *tokens_per_expert;
} te_op_moe_mask_map_args;

/* Makes row_id_map (index) from `experts` [T, topk], i32 or i64, the experts of each token. Copies are sorted by
 * expert, stably. Numbers of experts are compared as 32-bit unsigned numbers, so -1 comes last. Copies behind the first
 * num_out_tokens are dropped. */
typedef struct te_op_moe_index_map_args {
    const te_tensor *experts;
    te_tensor *row_id_map;
    int64_t num_out_tokens; /* 0 => all */
} te_op_moe_index_map_args;

/* Makes the list by which a rank sorts that has the `count` experts from number `first` on.
 *   experts  i32 or i64 [T, topk]: the experts of each token
 *   dropped  optional, u8 [T]: not 0 marks a token that is dropped (padding)
 *   local    i32 [T, topk], written: the number of each expert minus `first`; -1 for experts of other ranks and for
 *            dropped tokens
 *   tokens_per_expert   i32 or i64 [count], written: how many copies each of the `count` experts gets */
typedef struct te_op_moe_local_ids_args {
    const te_tensor *experts, *dropped;
    te_tensor *local, *tokens_per_expert;
    int64_t first, count; /* count: at least 1 */
} te_op_moe_local_ids_args;

/* Makes a row_id_map (index, topk 1) that moves whole chunks of T rows.
 *   sizes         i32 or i64 [n]: the rows of each chunk, in the order of the input
 *   sorted_index  optional, i32 or i64 [n], a permutation of 0 .. n-1: the numbers of the chunks in the order of the
 *                 output; NULL: the order stays. A list that is no permutation is an error (TE_ERR_INVALID). On the CPU
 *                 the call itself returns it, on a GPU the next call that waits
 *   offsets       optional, i32 or i64 [n], added to the destination rows of each chunk: the padding in front of the
 *                 chunk. Not with sorted_index
 *   chunk_numbers   row_id_map becomes the number of each row's chunk, not a destination row: `groups` of te_op_amax
 *                   and of the casts. Not with sorted_index or offsets
 * Rows behind the last chunk stay where they are; with offsets or chunk_numbers they are -1. */
typedef struct te_op_moe_chunk_map_args {
    const te_tensor *sizes, *sorted_index, *offsets;
    te_tensor *row_id_map;
    bool chunk_numbers;
} te_op_moe_chunk_map_args;

/* Moves the rows of x [T, H] to the rows of y [R, H] that the map names; rows of y without a source become 0. x and y
 * have one format of whole bytes.
 *   topk            of an index map; 0 => row_id_map is a mask map
 *   pad_offsets     optional, i32 or i64 [E], with a mask map: added to the destination rows of each expert
 *   probs           optional, float [T, E] or [T, topk], with permuted_probs [R] of the same format: the probability of
 *                   each copy is moved along to permuted_probs. With a mask map, a copy whose probability is 0 becomes
 *                   a row of zeros */
typedef struct te_op_moe_permute_args {
    const te_tensor *x, *row_id_map, *pad_offsets, *probs;
    te_tensor *y, *permuted_probs;
    int64_t topk;
} te_op_moe_permute_args;

/* y [T, H]: row t is the sum of the copies of token t among the rows of x [R, H], in f32; 0 for a token without copies.
 * x and y are of any float formats.
 *   merging_probs   optional, float [T, E] or [T, topk]: factors of the copies
 *   permuted_probs  optional, float [R], with probs float [T, E] or [T, topk]: moved back to probs; 0 where there is no
 *                   copy
 * row_id_map, pad_offsets and topk are as in te_op_moe_permute. Several copies may name one row, so with an index map
 * the operation also looks rows up in a table. */
typedef struct te_op_moe_unpermute_args {
    const te_tensor *x, *row_id_map, *pad_offsets, *merging_probs, *permuted_probs;
    te_tensor *y, *probs;
    int64_t topk;
} te_op_moe_unpermute_args;

/* The gradient of te_op_moe_unpermute with merging_probs.
 *   dx      [R, H], optional: row r is the row of dy of its token times the probability of the copy; 0 in rows that no
 *           copy comes from
 *   dprobs  optional, of any float format, in the shape of merging_probs: the dot product of a row of dy and a row of
 *           x; 0 where there is no copy. The map may name a row several times
 *   x       needed for dprobs
 * row_id_map, pad_offsets, topk and merging_probs are the forward's. */
typedef struct te_op_moe_unpermute_bwd_args {
    const te_tensor *dy, *x, *row_id_map, *pad_offsets, *merging_probs;
    te_tensor *dx, *dprobs;
    int64_t topk;
} te_op_moe_unpermute_bwd_args;

/* Computes the scores of logits [T, E], the topk experts of each token, and their probabilities, in f32. Of equal
 * scores the expert with the lower number is chosen (te_fused_topk_with_score_function says where TransformerEngine
 * differs). A chosen expert's probability is scaling_factor times its score, normalised.
 *   score_function   TE_SCORE_SOFTMAX, TE_SCORE_SIGMOID, or TE_SCORE_SQRTSOFTPLUS: sqrt(log(1 + exp(x)))
 *   use_pre_softmax  softmax over all experts; false => over the chosen experts
 *   expert_bias      optional, float [E], not with a softmax over the chosen experts: added to the scores for the
 *                    choice alone
 *   num_groups, group_topk   the experts stand in num_groups groups of equal size, and only those of the group_topk
 *                            best groups may be chosen. A group is ranked by the sum of its group_best best scores; 0:
 *                            no groups
 *   group_best       0 => topk / group_topk
 *   zero_other_groups   the biased scores of groups that are not chosen are multiplied by 0, not left out: such an
 *                       expert still comes before one with a negative score. NaN stays last
 *   norm_topk_prob   probabilities are divided by their sum + 1e-20 if topk > 1 (with all_scores for any topk); 0 =>
 *                    on, unless the scores are a softmax
 *   bias_in_probs    probabilities come from the biased scores as well
 *   all_scores       probs are the normalised scores of all experts, for an auxiliary loss: softmax over all, or
 *                    divided by the sum of all + 1e-20. The choice is made by these. Not with groups or scaling_factor,
 *                    and with a bias only if bias_in_probs
 *   probs            float [T, E], 0 for experts that are not chosen; NULL where topk_probs is given
 *   routing_map      optional, u8 [T, E]: 1 for each chosen expert
 *   routing_bits     optional, u8 [T, ceil(E / 8)]: the same in bits, expert e at bit e % 8 of byte e / 8
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
/* The gradient of te_op_moe_router_fwd: dlogits [T, E], float, from dprobs [T, E], the forward's logits and its
 * routing_map (not needed with all_scores). If the forward made topk_probs in place of probs, dtopk_probs and
 * topk_indices [T, topk] take the place of dprobs and routing_map. Indices outside 0 .. E-1 are an error
 * (TE_ERR_INVALID): on the CPU the call itself returns it, on a GPU the next call that waits. expert_bias is needed
 * with bias_in_probs alone. topk, score_function, use_pre_softmax, scaling_factor, all_scores, norm_topk_prob and
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

/* loss [1], float = coeff * num_experts / (topk * total^2) * the sum over columns e of tokens_per_expert[e] * (the sum
 * of column e of probs [T, C]), in f32. C is num_experts times the number of sequences. tokens_per_expert: i32, i64 or
 * float [C]. total is total_num_tokens, or total_device, i64 [1], if that is given. */
typedef struct te_op_moe_aux_loss_fwd_args {
    const te_tensor *probs, *tokens_per_expert, *total_device;
    te_tensor *loss;
    int64_t total_num_tokens;
    int num_experts, topk;
    float coeff;
} te_op_moe_aux_loss_fwd_args;
/* The gradient of te_op_moe_aux_loss_fwd: dprobs [T, C], float, from dloss [1], float. tokens_per_expert, total_device,
 * total_num_tokens, num_experts, topk and coeff are the forward's. */
typedef struct te_op_moe_aux_loss_bwd_args {
    const te_tensor *dloss, *tokens_per_expert, *total_device;
    te_tensor *dprobs;
    int64_t total_num_tokens;
    int num_experts, topk;
    float coeff;
} te_op_moe_aux_loss_bwd_args;

/* out [groups, N]: row g is the column sums of the rows of group g of x [M, N], in f32. These are bias gradients.
 * sizes: i32 or i64 [groups], the rows of each group, as in te_op_grouped_gemm. */
typedef struct te_op_grouped_column_sum_args {
    const te_tensor *x, *sizes;
    te_tensor *out;
} te_op_grouped_column_sum_args;
