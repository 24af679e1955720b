/* ops/moe/router_cpu.c: the reference of the router and its gradient. It computes in f32, and sums in double. */

static float te__score_of(te_score_function f, float x) {
    if (f == TE_SCORE_SIGMOID) return 1.0f / (1.0f + expf(-x));
    return sqrtf(x > 20.0f ? x : log1pf(expf(x)));
}
/* Returns d score / dx, given the score. */
static float te__score_slope(te_score_function f, float x, float score) {
    if (f == TE_SCORE_SIGMOID) return score * (1.0f - score);
    return (x > 20.0f ? 1.0f : 1.0f / (1.0f + expf(-x))) / (2.0f * score + 1e-20f);
}
/* Computes the softmax over the elements that `map` marks, or over all elements if it is NULL. The other elements of y
 * become 0. */
static void te__softmax_of(const float *x, const uint8_t *map, int64_t n, float *y) {
    float top = -INFINITY;
    double sum = 0.0;
    int64_t e;
    for (e = 0; e < n; e++)
        if (!map || map[e]) top = x[e] > top ? x[e] : top;
    for (e = 0; e < n; e++) {
        y[e] = map && !map[e] ? 0.0f : expf(x[e] - top);
        sum += (double)y[e];
    }
    for (e = 0; e < n; e++) y[e] = (float)((double)y[e] / sum);
}

/* Finds the `count` largest of key[0 .. n-1]. Writes their indices to which[], and marks them in taken[]. Of equal
 * keys, the lower index comes first. Keys must not be NaN. */
static void te__choose(const float *key, int64_t n, int count, uint8_t *taken, int32_t *which) {
    int64_t e;
    int i;
    memset(taken, 0, (size_t)n);
    for (i = 0; i < count; i++) {
        int64_t best = -1;
        for (e = 0; e < n; e++)
            if (!taken[e] && (best < 0 || key[e] > key[best])) best = e;
        taken[best] = 1;
        which[i] = (int32_t)best;
    }
}

/* One token's scores, keys and marks of experts. */
typedef struct te__router_room {
    float score[TE_MOE_MAX_EXPERTS], key[TE_MOE_MAX_EXPERTS], group[TE_MOE_MAX_EXPERTS], x[TE_MOE_MAX_EXPERTS];
    uint8_t map[TE_MOE_MAX_EXPERTS], taken[TE_MOE_MAX_EXPERTS];
    int32_t which[TE_MOE_MAX_EXPERTS];
} te__router_room;

/* Keeps only the keys of the experts in the best groups. All other keys become -infinity, or 0 with
 * zero_other_groups. */
static void te__keep_groups(const te_op_moe_router_fwd_args *a, te__router_room *m, int64_t experts) {
    int64_t size = experts / a->num_groups, e;
    int best = a->group_best, g, i;
    for (g = 0; g < a->num_groups; g++) {
        m->group[g] = 0.0f;
        te__choose(m->key + g * size, size, (int)te__min(best, size), m->taken, m->which);
        for (i = 0; i < te__min(best, size); i++) m->group[g] += m->key[g * size + m->which[i]];
    }
    te__choose(m->group, a->num_groups, a->group_topk, m->taken, m->which);
    for (e = 0; e < experts; e++)
        if (!m->taken[e / size]) m->key[e] = a->zero_other_groups && m->key[e] > -INFINITY ? 0.0f : -INFINITY;
}

/* Turns scores into probabilities. Experts that the map does not mark get 0. With all_scores, all experts get their
 * probability. */
static void te__finish_scores(const te_op_moe_router_fwd_args *a, te__router_room *m, int64_t experts) {
    double sum = 1e-20;
    int64_t e;
    for (e = 0; e < experts; e++) {
        if (a->bias_in_probs) m->score[e] += te__load_element(te__data(a->expert_bias), a->expert_bias->dtype, e);
        if (!a->all_scores && !m->map[e]) m->score[e] = 0.0f;
        sum += (double)m->score[e];
    }
    for (e = 0; e < experts; e++) {
        if (a->norm_topk_prob == TE_ON) m->score[e] = (float)((double)m->score[e] / sum);
        m->score[e] *= a->scaling_factor;
    }
}
static void te__route_token(const te_op_moe_router_fwd_args *a, te__router_room *m, int64_t t) {
    int64_t experts = te__cols(a->logits), e;
    bool softmax = a->score_function == TE_SCORE_SOFTMAX, over_all = a->use_pre_softmax || a->all_scores;
    int i;
    te__load_row(te__data(a->logits), a->logits->dtype, t * experts, experts, m->x);
    if (softmax && over_all) te__softmax_of(m->x, NULL, experts, m->score);
    for (e = 0; e < experts; e++) {
        if (!softmax)
            m->score[e] = te__score_of(a->score_function, m->x[e]);
        else if (!over_all)
            m->score[e] = m->x[e];
    }
    if (a->all_scores) te__finish_scores(a, m, experts);
    for (e = 0; e < experts; e++) {
        m->key[e] = m->score[e];
        if (a->expert_bias && !a->all_scores)
            m->key[e] += te__load_element(te__data(a->expert_bias), a->expert_bias->dtype, e);
        if (te__is_nan_bits(m->key[e])) m->key[e] = -INFINITY;
    }
    if (a->group_topk) te__keep_groups(a, m, experts);
    te__choose(m->key, experts, a->topk, m->map, m->which);
    if (softmax && !over_all) te__softmax_of(m->x, m->map, experts, m->score);
    if (!a->all_scores) te__finish_scores(a, m, experts);
    if (a->probs) te__store_row(te__data(a->probs), a->probs->dtype, t * experts, experts, m->score);
    if (a->routing_map) memcpy(te__u8_data(a->routing_map) + t * experts, m->map, (size_t)experts);
    if (a->routing_bits) {
        uint8_t *bits = te__u8_data(a->routing_bits) + t * te__div_up(experts, 8);
        memset(bits, 0, (size_t)te__div_up(experts, 8));
        for (e = 0; e < experts; e++) bits[e / 8] = (uint8_t)(bits[e / 8] | m->map[e] << e % 8);
    }
    for (i = 0; i < a->topk && a->topk_indices; i++) {
        te__store_index(a->topk_indices, t * a->topk + i, m->which[i]);
        if (a->topk_probs)
            te__store_row(te__data(a->topk_probs), a->topk_probs->dtype, t * a->topk + i, 1, &m->score[m->which[i]]);
    }
}

static void te__router_fwd_tokens(void *user, int64_t begin, int64_t end) {
    te__router_room room;
    int64_t t;
    for (t = begin; t < end; t++) te__route_token((const te_op_moe_router_fwd_args *)user, &room, t);
}
static te_result te__cpu_moe_router_fwd(te_ctx *te, const te_op_moe_router_fwd_args *a) {
    te_op_moe_router_fwd_args args = *a;
    te__parallel_for(te, te__rows(a->logits), 16, te__router_fwd_tokens, &args);
    return TE_OK;
}

static void te__route_token_bwd(const te_op_moe_router_bwd_args *a, te__router_room *m, int64_t t) {
    int64_t experts = te__cols(a->logits), e;
    bool softmax = a->score_function == TE_SCORE_SOFTMAX, over_all = a->use_pre_softmax || a->all_scores;
    double sum = 1e-20, dot = 0.0, along = 0.0;
    int i;
    te__load_row(te__data(a->logits), a->logits->dtype, t * experts, experts, m->x);
    if (a->dtopk_probs) {
        memset(m->map, 0, (size_t)experts);
        memset(m->group, 0, (size_t)experts * sizeof(float));
        for (i = 0; i < a->topk; i++) {
            e = te__load_index(te__data(a->topk_indices), a->topk_indices->dtype, t * a->topk + i);
            m->map[e] = 1;
            m->group[e] = te__load_element(te__data(a->dtopk_probs), a->dtopk_probs->dtype, t * a->topk + i);
        }
    } else {
        if (a->all_scores)
            memset(m->map, 1, (size_t)experts);
        else
            memcpy(m->map, te__u8_data(a->routing_map) + t * experts, (size_t)experts);
        te__load_row(te__data(a->dprobs), a->dprobs->dtype, t * experts, experts, m->group);
    }
    if (softmax) te__softmax_of(m->x, over_all ? NULL : m->map, experts, m->score);
    for (e = 0; e < experts; e++) {
        float biased = a->bias_in_probs ? te__load_element(te__data(a->expert_bias), a->expert_bias->dtype, e) : 0.0f;
        m->group[e] = m->map[e] ? m->group[e] * a->scaling_factor : 0.0f;
        if (!softmax) m->score[e] = te__score_of(a->score_function, m->x[e]);
        biased += m->score[e];
        if (m->map[e]) sum += (double)biased;
        dot += (double)m->group[e] * (double)biased;
    }
    for (e = 0; e < experts; e++) {
        if (a->norm_topk_prob == TE_ON && m->map[e])
            m->group[e] = (float)((double)m->group[e] / sum - dot / (sum * sum));
        along += (double)m->group[e] * (double)m->score[e];
    }
    for (e = 0; e < experts; e++) {
        if (softmax)
            m->key[e] = (float)((double)m->score[e] * ((double)m->group[e] - along));
        else
            m->key[e] = m->map[e] ? m->group[e] * te__score_slope(a->score_function, m->x[e], m->score[e]) : 0.0f;
    }
    te__store_row(te__data(a->dlogits), a->dlogits->dtype, t * experts, experts, m->key);
}
static void te__router_bwd_tokens(void *user, int64_t begin, int64_t end) {
    te__router_room room;
    int64_t t;
    for (t = begin; t < end; t++) te__route_token_bwd((const te_op_moe_router_bwd_args *)user, &room, t);
}
static te_result te__cpu_moe_router_bwd(te_ctx *te, const te_op_moe_router_bwd_args *a) {
    te_op_moe_router_bwd_args args = *a;
    if (a->dtopk_probs &&
        te__want_inside(te, TE__OUTSIDE_moe_router_bwd, a->topk_indices, 0, te__cols(a->logits), NULL) != TE_OK)
        return TE_ERR_INVALID;
    te__parallel_for(te, te__rows(a->logits), 16, te__router_bwd_tokens, &args);
    return TE_OK;
}
