/* ops/moe/op.c: checks the calls of the moe operations. This file must not depend on the backend. */

/* ---- maps ---- */

static te_result te__check_moe_splits(te_ctx *te, te_op_moe_splits_args *a) {
    int64_t n = te__numel(a->padded);
    te_result r = te__want_numel(te, "moe_splits", "sizes", a->sizes, n);
    if (r == TE_OK) r = te__want_numel(te, "moe_splits", "offsets", a->offsets, n);
    if (r != TE_OK) return r;
    if (a->align == 0) a->align = 1;
    if (a->align < 0 || a->align > INT32_MAX)
        return te__fail(
            te, TE_ERR_INVALID,
            "moe_splits: align is %lld; it cannot be negative, nor more than %d, the rows that a map counts",
            (long long)a->align, INT32_MAX);
    if (!a->sizes && n > TE_MOE_HOST_SPLITS)
        return te__fail(te, TE_ERR_INVALID,
                        "moe_splits: %lld numbers from the host; one call takes %d, or any number from a tensor",
                        (long long)n, TE_MOE_HOST_SPLITS);
    return TE_OK;
}

/* Checks that x has at most 2^31 - 1 elements, since maps store rows as i32. */
static te_result te__moe_want_countable(te_ctx *te, const char *op, const char *name, const te_tensor *x) {
    char text[TE__SHAPE_TEXT];
    if (te__numel(x) <= INT32_MAX) return TE_OK;
    return te__fail(te, TE_ERR_UNSUPPORTED, "%s: %s is %s; at most 2^31 - 1 elements are possible", op, name,
                    te__shape_text(x, text));
}

static te_result te__check_moe_mask_map(te_ctx *te, te_op_moe_mask_map_args *a) {
    te_result r = te__moe_want_countable(te, "moe_mask_map", "routing_map", a->routing_map);
    if (r == TE_OK)
        r = te__want_matrix(te, "moe_mask_map", "row_id_map", a->row_id_map, te__rows(a->routing_map),
                            2 * te__cols(a->routing_map) + 1, "routing_map", a->routing_map);
    return r == TE_OK
               ? te__want_numel(te, "moe_mask_map", "tokens_per_expert", a->tokens_per_expert, te__cols(a->routing_map))
               : r;
}
static te_result te__check_moe_index_map(te_ctx *te, te_op_moe_index_map_args *a) {
    te_result r = te__moe_want_countable(te, "moe_index_map", "experts", a->experts);
    if (r == TE_OK) r = te__want_numel(te, "moe_index_map", "row_id_map", a->row_id_map, te__numel(a->experts));
    if (r == TE_OK && a->num_out_tokens < 0)
        r = te__fail(te, TE_ERR_INVALID, "moe_index_map: num_out_tokens is %lld; 0 keeps all copies",
                     (long long)a->num_out_tokens);
    if (a->num_out_tokens == 0) a->num_out_tokens = te__numel(a->experts);
    return r;
}
static te_result te__check_moe_local_ids(te_ctx *te, te_op_moe_local_ids_args *a) {
    te_result r = te__moe_want_countable(te, "moe_local_ids", "experts", a->experts);
    if (r == TE_OK && (a->count < 1 || a->count > TE_MOE_MAX_EXPERTS || a->first < 0))
        r = te__fail(
            te, TE_ERR_INVALID,
            "moe_local_ids: %lld experts from number %lld on; 1 to %d of them, from 0 or a later one on, are possible",
            (long long)a->count, (long long)a->first, TE_MOE_MAX_EXPERTS);
    if (r == TE_OK) r = te__want_like(te, "moe_local_ids", "local", a->local, "experts", a->experts);
    if (r == TE_OK) r = te__want_numel(te, "moe_local_ids", "dropped", a->dropped, te__rows(a->experts));
    return r == TE_OK ? te__want_numel(te, "moe_local_ids", "tokens_per_expert", a->tokens_per_expert, a->count) : r;
}
static te_result te__check_moe_chunk_map(te_ctx *te, te_op_moe_chunk_map_args *a) {
    int64_t n = te__numel(a->sizes);
    te_result r = te__moe_want_countable(te, "moe_chunk_map", "row_id_map", a->row_id_map);
    if (r == TE_OK) r = te__want_numel(te, "moe_chunk_map", "sorted_index", a->sorted_index, n);
    if (r == TE_OK) r = te__want_numel(te, "moe_chunk_map", "offsets", a->offsets, n);
    if (r == TE_OK && a->sorted_index && a->offsets)
        r = te__fail(te, TE_ERR_INVALID,
                     "moe_chunk_map: sorted_index and offsets are both given; one of them moves the chunks");
    if (r == TE_OK && a->chunk_numbers && (a->sorted_index || a->offsets))
        r = te__fail(te, TE_ERR_INVALID,
                     "moe_chunk_map: chunk_numbers with %s, which moves rows; ask for the numbers alone",
                     a->offsets ? "offsets" : "sorted_index");
    return r;
}

/* ---- permute ---- */

/* The sizes of a map of either form. */
typedef struct te__moe_map {
    int64_t tokens, experts; /* experts: 0 for an index map */
    int64_t copies;          /* the most copies of a token: `experts` with a mask map, topk with an index map */
} te__moe_map;

static te_result te__moe_map_of(te_ctx *te, const char *op, const te_tensor *row_id_map, int64_t topk,
                                const te_tensor *pad_offsets, te__moe_map *m) {
    char text[TE__SHAPE_TEXT];
    memset(m, 0, sizeof(*m));
    if (topk < 0) return te__fail(te, TE_ERR_INVALID, "%s: topk is %lld; 0 means a mask map", op, (long long)topk);
    if (topk > 0) {
        if (te__numel(row_id_map) % topk)
            return te__fail(te, TE_ERR_SHAPE,
                            "%s: row_id_map is %s, and topk %lld; an index map has topk numbers for each token", op,
                            te__shape_text(row_id_map, text), (long long)topk);
        if (pad_offsets)
            return te__fail(te, TE_ERR_INVALID,
                            "%s: pad_offsets belong to a mask map, and topk %lld says that this is an index map", op,
                            (long long)topk);
        m->tokens = te__numel(row_id_map) / topk;
        m->copies = topk;
        return te__moe_want_countable(te, op, "row_id_map", row_id_map);
    }
    if (te__cols(row_id_map) % 2 == 0)
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: row_id_map is %s; a mask map is [T, 2E + 1] (an index map comes with topk)", op,
                        te__shape_text(row_id_map, text));
    m->tokens = te__rows(row_id_map);
    m->copies = m->experts = te__cols(row_id_map) / 2;
    if (m->tokens * m->copies > INT32_MAX)
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "%s: row_id_map is %s; at most 2^31 - 1 pairs of token and expert are possible", op,
                        te__shape_text(row_id_map, text));
    return te__want_numel(te, op, "pad_offsets", pad_offsets, m->experts);
}
/* Checks that x is NULL, or has one number for each token and each of its possible copies. */
static te_result te__moe_want_probs(te_ctx *te, const char *op, const char *name, const te_tensor *x,
                                    const te__moe_map *m, const te_tensor *map) {
    return x ? te__want_matrix(te, op, name, x, m->tokens, m->copies, "row_id_map", map) : TE_OK;
}
static te_result te__moe_want_rows(te_ctx *te, const char *op, const char *name, const te_tensor *x, int64_t rows,
                                   int64_t cols) {
    char text[TE__SHAPE_TEXT];
    if (!x || (te__rows(x) == rows && te__cols(x) == cols)) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; [%lld, %lld] is needed", op, name, te__shape_text(x, text),
                    (long long)rows, (long long)cols);
}

static te_result te__check_moe_permute(te_ctx *te, te_op_moe_permute_args *a) {
    te__moe_map m;
    te_result r = te__moe_map_of(te, "moe_permute", a->row_id_map, a->topk, a->pad_offsets, &m);
    if (r == TE_OK) r = te__want_one_format(te, "moe_permute", "x", a->x, "y", a->y);
    if (r == TE_OK) r = te__moe_want_rows(te, "moe_permute", "x", a->x, m.tokens, te__cols(a->y));
    if (r == TE_OK && te__rows(a->y) > INT32_MAX)
        r = te__fail(te, TE_ERR_UNSUPPORTED, "moe_permute: y has %lld rows; at most 2^31 - 1 are possible",
                     (long long)te__rows(a->y));
    if (r == TE_OK) r = te__moe_want_probs(te, "moe_permute", "probs", a->probs, &m, a->row_id_map);
    if (r == TE_OK && a->probs)
        r = te__want_dtype(te, "moe_permute", "permuted_probs", a->permuted_probs, a->probs->dtype);
    return r == TE_OK ? te__want_numel(te, "moe_permute", "permuted_probs", a->permuted_probs, te__rows(a->y)) : r;
}
static te_result te__check_moe_unpermute(te_ctx *te, te_op_moe_unpermute_args *a) {
    te__moe_map m;
    te_result r = te__moe_map_of(te, "moe_unpermute", a->row_id_map, a->topk, a->pad_offsets, &m);
    if (r == TE_OK) r = te__moe_want_rows(te, "moe_unpermute", "y", a->y, m.tokens, te__cols(a->x));
    if (r == TE_OK) r = te__moe_want_probs(te, "moe_unpermute", "merging_probs", a->merging_probs, &m, a->row_id_map);
    if (r == TE_OK) r = te__moe_want_probs(te, "moe_unpermute", "probs", a->probs, &m, a->row_id_map);
    return r == TE_OK ? te__want_numel(te, "moe_unpermute", "permuted_probs", a->permuted_probs, te__rows(a->x)) : r;
}
static te_result te__check_moe_unpermute_bwd(te_ctx *te, te_op_moe_unpermute_bwd_args *a) {
    te__moe_map m;
    te_result r = te__moe_map_of(te, "moe_unpermute_bwd", a->row_id_map, a->topk, a->pad_offsets, &m);
    const te_tensor *rows = a->dx ? a->dx : a->x;
    if (r == TE_OK) r = te__moe_want_rows(te, "moe_unpermute_bwd", "dy", a->dy, m.tokens, te__cols(a->dy));
    if (r == TE_OK && rows)
        r = te__moe_want_rows(te, "moe_unpermute_bwd", a->dx ? "dx" : "x", rows, te__rows(rows), te__cols(a->dy));
    if (r == TE_OK && rows) r = te__moe_want_rows(te, "moe_unpermute_bwd", "x", a->x, te__rows(rows), te__cols(a->dy));
    if (r == TE_OK)
        r = te__moe_want_probs(te, "moe_unpermute_bwd", "merging_probs", a->merging_probs, &m, a->row_id_map);
    return r == TE_OK ? te__moe_want_probs(te, "moe_unpermute_bwd", "dprobs", a->dprobs, &m, a->row_id_map) : r;
}

/* ---- router ---- */

static te_result te__moe_check_choice(te_ctx *te, const char *op, const te_tensor *logits, int topk,
                                      te_score_function f) {
    char text[TE__SHAPE_TEXT];
    int64_t experts = te__cols(logits);
    if (logits->ndim < 1 || experts < 1 || experts > TE_MOE_MAX_EXPERTS)
        return te__fail(te, TE_ERR_SHAPE, "%s: logits are %s; [.., E] with E from 1 to %d is needed", op,
                        te__shape_text(logits, text), TE_MOE_MAX_EXPERTS);
    if (topk < 1 || topk > experts)
        return te__fail(te, TE_ERR_INVALID, "%s: topk is %d of %lld experts; from 1 to all of them are possible", op,
                        topk, (long long)experts);
    if (f != TE_SCORE_SOFTMAX && f != TE_SCORE_SIGMOID && f != TE_SCORE_SQRTSOFTPLUS)
        return te__fail(te, TE_ERR_INVALID, "%s: %d is not a te_score_function", op, (int)f);
    return TE_OK;
}
/* Returns whether probabilities are divided by their sum. */
static bool te__moe_normalises(te_switch given, te_score_function f, int topk, bool all_scores) {
    return te__switch(given, f != TE_SCORE_SOFTMAX) && (all_scores || topk > 1);
}
static te_result te__moe_check_groups(te_ctx *te, const te_op_moe_router_fwd_args *a) {
    int64_t experts = te__cols(a->logits), size, allowed;
    if (a->num_groups == 0 && a->group_topk == 0)
        return a->zero_other_groups ? te__fail(te, TE_ERR_INVALID,
                                               "moe_router_fwd: zero_other_groups without groups; give num_groups and "
                                               "group_topk, or leave it false")
                                    : TE_OK;
    if (a->num_groups < 1 || a->group_topk < 1 || a->group_topk > a->num_groups || experts % a->num_groups ||
        a->group_best < 0 || (!a->group_best && a->topk % a->group_topk))
        return te__fail(te, TE_ERR_INVALID,
                        "moe_router_fwd: num_groups %d and group_topk %d, of %lld experts and topk %d; groups of equal "
                        "size, at most as many as there are, "
                        "and a topk that is a multiple of group_topk, or a group_best, are needed",
                        a->num_groups, a->group_topk, (long long)experts, a->topk);
    size = experts / a->num_groups;
    allowed = size * a->group_topk;
    if (a->topk > allowed && !a->zero_other_groups)
        return te__fail(te, TE_ERR_INVALID,
                        "moe_router_fwd: topk %d, and %d groups of %lld experts have %lld; a smaller topk, a larger "
                        "group_topk or zero_other_groups is needed",
                        a->topk, a->group_topk, (long long)size, (long long)allowed);
    return TE_OK;
}
static te_result te__check_moe_router_fwd(te_ctx *te, te_op_moe_router_fwd_args *a) {
    int64_t tokens = te__rows(a->logits), experts = te__cols(a->logits);
    te_result r = te__moe_check_choice(te, "moe_router_fwd", a->logits, a->topk, a->score_function);
    if (r == TE_OK) r = te__moe_check_groups(te, a);
    if (r != TE_OK) return r;
    if (a->expert_bias && a->score_function == TE_SCORE_SOFTMAX && !a->use_pre_softmax && !a->all_scores)
        return te__fail(te, TE_ERR_INVALID,
                        "moe_router_fwd: expert_bias with softmax over the chosen experts; it goes with "
                        "use_pre_softmax, sigmoid and sqrtsoftplus scores");
    if (a->bias_in_probs && !a->expert_bias)
        return te__fail(te, TE_ERR_INVALID,
                        "moe_router_fwd: bias_in_probs without expert_bias; give the bias, or leave it false");
    if (a->all_scores && a->topk_probs)
        return te__fail(te, TE_ERR_INVALID,
                        "moe_router_fwd: all_scores with topk_probs; the scores of all experts are written to probs");
    if (a->all_scores && ((a->expert_bias && !a->bias_in_probs) || a->num_groups ||
                          (a->scaling_factor != 0.0f && a->scaling_factor != 1.0f)))
        return te__fail(te, TE_ERR_INVALID,
                        "moe_router_fwd: all_scores with expert_bias, groups or a scaling_factor; the scores of all "
                        "experts have none");
    if (a->scaling_factor == 0.0f) a->scaling_factor = 1.0f;
    a->norm_topk_prob =
        te__moe_normalises(a->norm_topk_prob, a->score_function, a->topk, a->all_scores) ? TE_ON : TE_OFF;
    if (a->group_topk && !a->group_best) a->group_best = a->topk / a->group_topk;
    r = te__want_numel(te, "moe_router_fwd", "expert_bias", a->expert_bias, experts);
    if (r == TE_OK) r = te__want_like(te, "moe_router_fwd", "probs", a->probs, "logits", a->logits);
    if (r == TE_OK) r = te__want_like(te, "moe_router_fwd", "routing_map", a->routing_map, "logits", a->logits);
    if (r == TE_OK)
        r = te__moe_want_rows(te, "moe_router_fwd", "routing_bits", a->routing_bits, tokens, te__div_up(experts, 8));
    if (r == TE_OK) r = te__moe_want_rows(te, "moe_router_fwd", "topk_probs", a->topk_probs, tokens, a->topk);
    return r == TE_OK ? te__moe_want_rows(te, "moe_router_fwd", "topk_indices", a->topk_indices, tokens, a->topk) : r;
}
static te_result te__check_moe_router_bwd(te_ctx *te, te_op_moe_router_bwd_args *a) {
    te_result r = te__moe_check_choice(te, "moe_router_bwd", a->logits, a->topk, a->score_function);
    if (a->scaling_factor == 0.0f) a->scaling_factor = 1.0f;
    a->norm_topk_prob =
        te__moe_normalises(a->norm_topk_prob, a->score_function, a->topk, a->all_scores) ? TE_ON : TE_OFF;
    if (r == TE_OK && a->dtopk_probs && (a->dprobs || a->all_scores))
        return te__fail(te, TE_ERR_INVALID,
                        "moe_router_bwd: dtopk_probs with %s; the gradient is of one of the forward's outputs",
                        a->dprobs ? "dprobs" : "all_scores");
    if (r == TE_OK)
        r = te__moe_want_rows(te, "moe_router_bwd", "topk_indices", a->topk_indices, te__rows(a->logits), a->topk);
    if (r == TE_OK)
        r = te__moe_want_rows(te, "moe_router_bwd", "dtopk_probs", a->dtopk_probs, te__rows(a->logits), a->topk);
    if (r == TE_OK) r = te__want_numel(te, "moe_router_bwd", "expert_bias", a->expert_bias, te__cols(a->logits));
    if (r == TE_OK) r = te__want_like(te, "moe_router_bwd", "routing_map", a->routing_map, "logits", a->logits);
    if (r == TE_OK) r = te__want_like(te, "moe_router_bwd", "dprobs", a->dprobs, "logits", a->logits);
    return r == TE_OK ? te__want_like(te, "moe_router_bwd", "dlogits", a->dlogits, "logits", a->logits) : r;
}

/* ---- auxiliary loss, sums ---- */

static te_result te__moe_check_loss(te_ctx *te, const char *op, const char *name, const te_tensor *probs,
                                    const te_tensor *counts, const te_tensor *total_device, int64_t total, int experts,
                                    int topk) {
    char text[TE__SHAPE_TEXT];
    te_result r;
    if (experts < 1 || topk < 1)
        return te__fail(te, TE_ERR_INVALID, "%s: num_experts %d and topk %d; both must be at least 1", op, experts,
                        topk);
    if (probs->ndim < 1 || te__cols(probs) < 1 || te__cols(probs) % experts)
        return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s, and num_experts %d; the last size must be a multiple of it",
                        op, name, te__shape_text(probs, text), experts);
    r = te__want_numel(te, op, "tokens_per_expert", counts, te__cols(probs));
    if (r == TE_OK && !total_device && total < 1)
        r = te__fail(te, TE_ERR_INVALID,
                     "%s: total_num_tokens is %lld, and total_device NULL; the number of tokens is needed", op,
                     (long long)total);
    return r;
}
static te_result te__check_moe_aux_loss_fwd(te_ctx *te, te_op_moe_aux_loss_fwd_args *a) {
    return te__moe_check_loss(te, "moe_aux_loss_fwd", "probs", a->probs, a->tokens_per_expert, a->total_device,
                              a->total_num_tokens, a->num_experts, a->topk);
}
static te_result te__check_moe_aux_loss_bwd(te_ctx *te, te_op_moe_aux_loss_bwd_args *a) {
    return te__moe_check_loss(te, "moe_aux_loss_bwd", "dprobs", a->dprobs, a->tokens_per_expert, a->total_device,
                              a->total_num_tokens, a->num_experts, a->topk);
}
static te_result te__check_grouped_column_sum(te_ctx *te, te_op_grouped_column_sum_args *a) {
    char x[TE__SHAPE_TEXT], out[TE__SHAPE_TEXT];
    if (te__numel(a->out) == te__numel(a->sizes) * te__cols(a->x)) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "grouped_column_sum: x is %s and sizes %lld, so out must be [%lld, %lld], not %s",
                    te__shape_text(a->x, x), (long long)te__numel(a->sizes), (long long)te__numel(a->sizes),
                    (long long)te__cols(a->x), te__shape_text(a->out, out));
}
