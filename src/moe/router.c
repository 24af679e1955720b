/* moe/router.c: differentiable functions for the top-k choice of experts, the scores of all experts, and the auxiliary
 * loss. This file must not depend on modules. */

/* Backward function of all router functions. `state` is the args of the forward pass; its tensors are not read.
 * saved[0] to saved[2]:
 * - the logits
 * - the routing map u8 or, if the args have topk_probs, the indices
 * - the bias if bias_in_probs is set in the args */
static te_result te__router_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                     te_tensor **dx, const bool *needs) {
    const te_op_moe_router_fwd_args *f = (const te_op_moe_router_fwd_args *)state;
    te_op_moe_router_bwd_args args = TE_ZERO;
    te_tensor *g = te_tensor_contiguous(dy[0]);
    (void)needs;
    args.logits = saved[0];
    if (f->topk_probs) {
        args.topk_indices = saved[1];
        args.dtopk_probs = g;
    } else {
        args.routing_map = saved[1];
        args.dprobs = g;
    }
    args.expert_bias = saved[2];
    args.dlogits = dx[0] = te__empty_like(saved[0], saved[0]->dtype);
    args.topk = f->topk;
    args.score_function = f->score_function;
    args.use_pre_softmax = f->use_pre_softmax;
    args.scaling_factor = f->scaling_factor;
    args.all_scores = f->all_scores;
    args.norm_topk_prob = f->norm_topk_prob;
    args.bias_in_probs = f->bias_in_probs;
    return g && dx[0] ? te_op_moe_router_bwd(te, &args) : te_error_code(te);
}
/* Runs the router on `logits` with the options in *args, and records a tape node. Returns args->topk_probs or
 * args->probs. */
static te_tensor *te__run_router(const char *name, te_tensor *logits, te_op_moe_router_fwd_args *args) {
    te_tensor *y = args->topk_probs ? args->topk_probs : args->probs,
              *saved[3] = {logits,
                           args->all_scores   ? NULL
                           : args->topk_probs ? args->topk_indices
                                              : args->routing_map,
                           args->bias_in_probs ? (te_tensor *)(uintptr_t)args->expert_bias : NULL};
    args->logits = logits;
    return te__record(name, te__checked(y, te_op_moe_router_fwd(logits->te, args)), te__router_backward, args,
                      sizeof(*args), &logits, 1, saved, 3);
}

static te_tensor *te__route(const char *name, te_tensor *logits, const te_fused_topk_desc *d, bool all_scores,
                            te_tensor **routing_map) {
    te_op_moe_router_fwd_args args = TE_ZERO;
    te_tensor *made[2] = {NULL, NULL}, *bits = NULL;
    te_ctx *te;
    int64_t shape[TE_MAX_DIMS];
    bool as_bits;
    if (routing_map) *routing_map = NULL;
    if (!logits || !te__need_float(logits, name) || !te__operand(logits, d->expert_bias, true, name) ||
        !te__operand(logits, d->topk_indices, true, name))
        return NULL;
    te = logits->te;
    if (d->routing_map_format != TE_ROUTING_BYTEMAP && d->routing_map_format != TE_ROUTING_BITMAP_U8)
        return te__no_tensor(
            te, TE_ERR_INVALID,
            "%s: routing_map_format %d; TE_ROUTING_BYTEMAP (0) and TE_ROUTING_BITMAP_U8 (1) are possible", name,
            (int)d->routing_map_format);
    if (d->expert_bias && d->score_function == TE_SCORE_SOFTMAX)
        return te__no_tensor(te, TE_ERR_INVALID,
                             "%s: expert_bias with softmax; it goes with sigmoid and sqrtsoftplus scores", name);
    logits = te_tensor_contiguous(logits);
    if (!logits) return NULL;
    te__frame_begin(te);
    memcpy(shape, logits->shape, sizeof(shape));
    if (logits->ndim > 0) shape[logits->ndim - 1] = te__div_up(te__cols(logits), 8);
    as_bits = routing_map && d->routing_map_format == TE_ROUTING_BITMAP_U8;
    if (as_bits) bits = te_tensor_empty(te, TE_U8, logits->ndim, shape);
    args.expert_bias = d->expert_bias;
    args.routing_map = te__empty_like(logits, TE_U8); /* always made, because the backward pass reads it */
    args.probs = te__empty_like(logits, all_scores ? TE_F32 : logits->dtype);
    args.routing_bits = bits;
    args.topk_indices = d->topk_indices;
    args.topk = d->topk;
    args.score_function = d->score_function;
    args.use_pre_softmax = d->use_pre_softmax;
    args.num_groups = d->num_groups;
    args.group_topk = d->group_topk;
    args.scaling_factor = d->scaling_factor;
    args.all_scores = all_scores;
    if (args.routing_map && args.probs && (bits || !as_bits)) made[0] = te__run_router(name, logits, &args);
    made[1] = !made[0] || !routing_map ? NULL : bits ? bits : args.routing_map;
    te__frame_end(te, made, 2);
    if (routing_map) *routing_map = made[1];
    return made[0];
}
TE_API te_tensor *te_fused_topk_with_score_function(te_tensor *logits, const te_fused_topk_desc *desc,
                                                    te_tensor **routing_map) {
    if (routing_map) *routing_map = NULL;
    if (!logits || !te__has_desc(logits->te, desc, "te_fused_topk_with_score_function")) return NULL;
    return te__route("te_fused_topk_with_score_function", logits, desc, false, routing_map);
}
TE_API te_tensor *te_fused_compute_score_for_moe_aux_loss(te_tensor *logits, int topk, te_score_function score_function,
                                                          te_routing_map_format routing_map_format,
                                                          te_tensor **routing_map) {
    te_fused_topk_desc desc = TE_ZERO;
    desc.topk = topk;
    desc.score_function = score_function;
    desc.routing_map_format = routing_map_format;
    return te__route("te_fused_compute_score_for_moe_aux_loss", logits, &desc, true, routing_map);
}

/* ---- auxiliary loss ---- */

typedef struct te__aux_loss_state {
    te_fused_moe_aux_loss_desc desc;
    te__like probs;
} te__aux_loss_state;

/* saved[0] is tokens_per_expert. saved[1] is total_num_tokens_tensor (the number of tokens, on the device) or NULL. */
static te_result te__aux_loss_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                       te_tensor **dx, const bool *needs) {
    const te__aux_loss_state *s = (const te__aux_loss_state *)state;
    te_op_moe_aux_loss_bwd_args args = TE_ZERO;
    (void)needs;
    args.dloss = dy[0];
    args.tokens_per_expert = saved[0];
    args.total_device = saved[1];
    args.dprobs = dx[0] = te__empty_of(te, &s->probs);
    args.total_num_tokens = s->desc.total_num_tokens;
    args.num_experts = s->desc.num_experts;
    args.topk = s->desc.topk;
    args.coeff = s->desc.coeff;
    return dx[0] ? te_op_moe_aux_loss_bwd(te, &args) : te_error_code(te);
}
TE_API te_tensor *te_fused_moe_aux_loss(te_tensor *probs, te_tensor *tokens_per_expert,
                                        const te_fused_moe_aux_loss_desc *desc) {
    static const char name[] = "te_fused_moe_aux_loss";
    te_op_moe_aux_loss_fwd_args args = TE_ZERO;
    te__aux_loss_state state = TE_ZERO;
    te_tensor *loss;
    te_ctx *te;
    if (!probs || !te__has_desc(probs->te, desc, name) || !te__need_float(probs, name) ||
        !te__operand(probs, tokens_per_expert, false, name) ||
        !te__operand(probs, desc->total_num_tokens_tensor, true, name))
        return NULL;
    te = probs->te;
    probs = te_tensor_contiguous(probs);
    tokens_per_expert = te_tensor_contiguous(tokens_per_expert);
    loss = probs && tokens_per_expert ? te__empty_1d(te, probs->dtype, 1) : NULL;
    if (!loss) return NULL;
    state.desc = *desc;
    state.probs = te__like_of(probs);
    args.probs = probs;
    args.tokens_per_expert = tokens_per_expert;
    args.total_device = desc->total_num_tokens_tensor;
    args.loss = loss;
    args.total_num_tokens = desc->total_num_tokens;
    args.num_experts = desc->num_experts;
    args.topk = desc->topk;
    args.coeff = desc->coeff;
    te_tensor *saved[2] = {tokens_per_expert, desc->total_num_tokens_tensor};
    return te__record(name, te__checked(loss, te_op_moe_aux_loss_fwd(te, &args)), te__aux_loss_backward, &state,
                      sizeof(state), &probs, 1, saved, 2);
}
